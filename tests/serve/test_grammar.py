"""What may come next is what can still become a text of the grammar, token by token."""

import json
import re
import string

import jsonschema
import numpy as np
import pytest

from axon.data.tokenizer import Bpe, Tokenizer
from axon.errors import UserError
from axon.serve.grammar import Grammars, Matcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "maxItems": 3, "items": {"enum": ["cat", "dog", None, 3]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}}}
    },
    "$ref": "#/$defs/node",
}
ENDLESS = {
    "$defs": {
        "node": {"type": "object", "properties": {"children": {"$ref": "#/$defs/list"}}, "required": ["children"]},
        "list": {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#/$defs/node"}]}},
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
}
SCHEMAS = {
    "object": PERSON,
    "recursive": TREE,
    "one of": {"anyOf": [{"type": "number"}, {"const": "none"}, {"type": "string", "pattern": "^[a-z]{2,5}$"}]},
    "array": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "array", "items": {"type": "null"}}},
    "date": {"type": "string", "format": "date"},
}
PATTERNS = (r"[a-c]{3}", r"(ab|c)*d", r"\d{4}-\d{2}", r"é|中+|😀", r"a/b\n?", "x.{0,5}y")


@pytest.fixture(scope="module")
def tokenizer(shared_seed) -> Tokenizer:
    """One whose ids stand for parts of JSON: `":`, ` {"`, `e": `."""
    rng = np.random.default_rng(shared_seed)
    texts = [json.dumps({"".join(rng.choice([*string.ascii_lowercase], 4)): [float(n), None, "é"]}) for n in range(300)]
    return Bpe(vocab=400).train(iter(texts), report=lambda _: None)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab=450)


def ids_of(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(grammar: Matcher, tokenizer: Tokenizer, rng: np.random.Generator, hurry: int = 60) -> str:
    """A text of uniform draws among what is allowed; after `hurry` tokens, what closes a part is drawn if it may be."""
    closing = [token for token in range(tokenizer.vocab) if tokenizer.decode([token]) in ('"', "}", "]")]
    text = []
    for step in range(20 * hurry):
        allowed = ids_of(grammar.allowed())
        assert len(allowed)
        ending = np.intersect1d(allowed, [*tokenizer.ends, *closing])
        token = int(rng.choice(ending if step > hurry and len(ending) else allowed))
        assert grammar.accept([token]) == 1
        if token in tokenizer.ends:
            assert grammar.ended
            assert not grammar.allowed().any()
            return tokenizer.decode(text)
        text.append(token)
    pytest.fail(f"no end in {tokenizer.decode(text)!r}")


def takes(grammar: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    ids = [*tokenizer.encode(text), tokenizer.bos]
    return grammar.accept(ids) == len(ids)


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_walk_among_the_allowed_ids_ends_in_json_of_the_schema(grammars, tokenizer, name, rng):
    for _ in range(10):
        text = walk(grammars.json_schema(SCHEMAS[name]), tokenizer, rng)
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_any_walk_for_a_json_object_ends_in_one(grammars, tokenizer, rng):
    for _ in range(10):
        assert isinstance(json.loads(walk(grammars.json_object(), tokenizer, rng)), dict)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_walk_for_a_regular_expression_ends_in_a_whole_match(grammars, tokenizer, pattern, rng):
    for _ in range(10):
        assert re.fullmatch(pattern, walk(grammars.regex(pattern), tokenizer, rng))


def test_any_walk_among_choices_ends_in_one(grammars, tokenizer, rng):
    choices = ["yes", "no", 'a "quote"', "back\\slash", "two\nlines", "é😀", "<|endoftext|>"]
    found = {walk(grammars.choices(choices), tokenizer, rng) for _ in range(60)}
    assert found <= {*choices}
    assert len(found) > 2


def test_any_walk_in_a_context_free_grammar_ends_in_balanced_text(grammars, tokenizer, rng):
    for _ in range(10):
        text = walk(grammars.lark('start: "(" start ")" | "x"'), tokenizer, rng, hurry=10)
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


def test_a_valid_document_is_accepted_however_it_is_spaced_and_tokenised(grammars, tokenizer, rng):
    for _ in range(20):
        person = {
            "name": "".join(rng.choice([*'aé中😀"\\\n'], 6)),
            "age": int(rng.integers(150)),
            "pets": ["cat", None],
        }
        for indent, ascii_only in ((None, False), (None, True), (4, False)):
            text = json.dumps(person, indent=indent, ensure_ascii=ascii_only)
            ids = [token for byte in text for token in tokenizer.encode(byte)]
            assert takes(grammars.json_schema(PERSON), tokenizer, text), text
            assert grammars.json_schema(PERSON).accept(ids) == len(ids), text


def test_a_document_that_breaks_the_schema_is_not_accepted(grammars, tokenizer):
    for text in (
        '{"name": "Ada"}',
        '{"name": "Ada", "age": 200}',
        '{"name": 1, "age": 2}',
        '{"name": "a", "age": 1, "x": 1}',
    ):
        assert not takes(grammars.json_schema(PERSON), tokenizer, text)


def test_masks_are_those_of_trying_every_id(grammars, tokenizer, rng):
    grammar = grammars.json_schema(PERSON)
    for _ in range(12):
        allowed = ids_of(grammar.allowed())
        assert [token for token in range(450) if grammar.copy().accept([token])] == [*allowed]
        grammar.accept([int(rng.choice(np.setdiff1d(allowed, [tokenizer.bos])))])


def test_ids_beyond_the_tokenizers_and_special_tokens_are_never_allowed(grammars, tokenizer):
    grammar = grammars.regex(r"(.|\n)*")
    allowed = ids_of(grammar.allowed())
    assert len(grammar.allowed()) == -(-450 // 32)
    assert allowed.max() < tokenizer.vocab
    assert tokenizer.bos in allowed  # the text may end here
    strict = grammars.regex(r"(.|\n)+")
    assert tokenizer.bos not in ids_of(strict.allowed())


def test_a_complete_text_may_end_with_each_of_the_tokenizers_ends_and_nothing_follows(tokenizer, rng):
    inner = tokenizer._inner.from_str(tokenizer.to_json())
    inner.add_special_tokens(["<|im_end|>"])
    both = frozenset({tokenizer.bos, tokenizer.vocab})
    two = Grammars(Tokenizer(inner, tokenizer.bos, both))
    for end in both:
        grammar = two.regex("ab")
        assert not grammar.accept([end])
        assert not grammar.ended
        assert grammar.accept(tokenizer.encode("ab")) == len(tokenizer.encode("ab"))
        assert grammar.ended
        assert frozenset(ids_of(grammar.allowed())) == both
        assert grammar.accept([end, end, *tokenizer.encode("a")]) == 1
        assert not grammar.allowed().any()


def test_without_ends_a_complete_text_allows_nothing_more(tokenizer):
    grammar = Grammars(Tokenizer(tokenizer._inner.from_str(tokenizer.to_json()), tokenizer.bos, frozenset())).regex(
        "ab"
    )
    grammar.accept(tokenizer.encode("ab"))
    assert grammar.ended
    assert not grammar.allowed().any()


def test_copies_go_their_own_ways(grammars, tokenizer):
    first = grammars.choices(["abx", "aby"])
    first.accept(tokenizer.encode("ab"))
    before = first.allowed()
    second = first.copy()
    assert second.accept(tokenizer.encode("x")) == 1
    assert second.ended
    assert not first.ended
    np.testing.assert_array_equal(first.allowed(), before)
    assert first.accept(tokenizer.encode("y")) == 1


def draft_masks(grammar, drafts):
    """What may come next before and after each of `drafts`, up to the first that is not allowed; `grammar` stays."""
    ahead = grammar.copy()
    masks = [ahead.allowed()]
    for token in drafts:
        if not ahead.accept([token]):
            break
        masks.append(ahead.allowed())
    return masks


def test_the_masks_of_drafts_are_those_of_accepting_them_one_by_one(grammars, tokenizer, rng):
    ids = [*tokenizer.encode('{"name": "Ada", "age": 36}'), tokenizer.bos]
    cut = int(rng.integers(len(ids)))
    grammar = grammars.json_schema(PERSON)
    grammar.accept(ids[:cut])
    masks = draft_masks(grammar, ids[cut:])
    assert len(masks) == len(ids) - cut + 1
    for mask, token in zip(masks, [*ids[cut:], None], strict=True):
        np.testing.assert_array_equal(mask, grammar.allowed())
        grammar.accept([] if token is None else [token])
    assert len(draft_masks(grammars.regex("ab"), tokenizer.encode("zz"))) == 1


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength (5) is greater than maxLength (2)"),
        ({"type": "number", "minimum": 5, "maximum": 2}, "minimum (5) is greater"),
        ({"$ref": "#/$defs/missing"}, "'/$defs/missing' does not exist"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"$ref": "#"}, "no text meets it"),
        (ENDLESS, "no text meets it, for it requires itself within itself without end"),
        ({"type": "text"}, "Invalid type: text"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "^(a"}, "unclosed group"),
        ({"type": "string", "pattern": "(a{1000}){1000}"}, "1,000,000 characters"),
        ({"type": "string", "format": "tartan"}, "Unknown format: tartan"),
        ({"minimum": float("nan")}, "is not JSON"),
        ({"enum": ["x" * 2**18]}, "at most 262,144"),
        (False, "is a bool; expected an object"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_hold_is_one_clear_message(grammars, schema, said):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        grammars.json_schema(schema)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "The regular expression cannot be used: .*unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"[^\s\S]", "no text meets it"),
        ("regex", "((a{100}){100}){100}", "1,000,000 characters"),
        ("regex", "a" * 300_000, "has 300,000 characters"),
        ("lark", "start: x", 'The grammar cannot be used: unknown name: "x"'),
        ("lark", "start: start", "no text meets it"),
        ("lark", "", "no start rule"),
        ("choices", [], "no choices"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_invalid_pattern_or_grammar_is_one_clear_message(grammars, kind, text, said):
    with pytest.raises(UserError, match=said) as raised:
        getattr(grammars, kind)(text)
    assert "\n" not in str(raised.value)


def test_a_schema_nested_without_end_is_a_clear_message(grammars):
    schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(UserError, match="is not JSON"):
        grammars.json_schema(schema)
