"""Calls are read back as they were written, however the text comes in, and what is no call stays text."""

import json
import re

import jsonschema
import numpy as np
import pytest

from axon.data.tokenizer import Bpe, Tokenizer
from axon.errors import UserError
from axon.serve.calls import HERMES, LLAMA, MISTRAL, CallForm, CallReader, Parsed, ToolCall, form_of
from axon.serve.grammar import Grammars
from axon.serve.tools import call_grammar

FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
NAMES = ("weather", "send_mail")
MAIL = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/who"}, "urgent": {"type": "boolean"}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"who": {"enum": ["ada", "grace"]}},
}
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["days"],
}
WEATHER["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "send_mail", "parameters": MAIL}},
]
TRICKY = ["</tool_call>", "<tool_call>", '"', "\\", "}", "]", "é", "\n", "[TOOL_CALLS]", "{", "a"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [json.dumps(TOOLS), "<tool_call>\n</tool_call>", json.dumps({"name": "weather", "parameters": {"days": 3}})]
    inner = Bpe(vocab=330).train(iter(texts * 3), report=lambda _: None)._inner
    inner.add_special_tokens(["[TOOL_CALLS]"])
    inner.add_tokens(["<tool_call>"])
    return Tokenizer(inner, 0)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer)


def random_calls(rng, count: int) -> list[dict]:
    text = lambda: "".join(rng.choice(TRICKY, int(rng.integers(5))))  # noqa: E731
    return [{"name": str(rng.choice(NAMES)), "arguments": {text(): [text(), {"x": 1}]}} for _ in range(count)]


def written(form: CallForm, calls: list[dict]) -> str:
    """As a model of the family writes them."""
    objects = [json.dumps({"name": c["name"], form.arguments: c["arguments"]}, ensure_ascii=False) for c in calls]
    if form.listed:
        return f"{form.opening}[{', '.join(objects)}]"
    return "\n".join(f"{form.opening}\n{one}\n{form.closing}" if form.closing else one for one in objects)


def as_calls(calls: list[dict]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(c["name"], json.dumps(c["arguments"], ensure_ascii=False)) for c in calls)


def in_pieces(rng, form: CallForm, text: str) -> Parsed:
    reader, found = CallReader(form, NAMES), Parsed()
    while text:
        cut = int(rng.integers(1, 8))
        found, text = found + reader.feed(text[:cut]), text[cut:]
    return found + reader.finish()


def parse_calls(form, names, text):
    """The calls in a whole text, and what else there is."""
    reader = CallReader(form, names)
    return reader.feed(text) + reader.finish()


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_as_they_were_written(name, rng):
    form = FORMS[name]
    for _ in range(30):
        calls = random_calls(rng, int(rng.integers(1, 4)))
        before = "" if form.bare else str(rng.choice(["", "I will look.", "a < b\n"]))
        text = before + written(form, calls)
        assert parse_calls(form, NAMES, text) == Parsed(before.rstrip(), as_calls(calls)), text


@pytest.mark.parametrize("name", FORMS)
def test_how_the_text_is_cut_into_pieces_makes_no_difference(name, rng):
    form = FORMS[name]
    for _ in range(60):
        parts = [written(form, random_calls(rng, 1)), "hello ", " <tool", *TRICKY, form.opening, '{"name"', "\n"]
        text = "".join(rng.choice(parts, int(rng.integers(1, 7))))
        assert in_pieces(rng, form, text) == parse_calls(form, NAMES, text), text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>not JSON</tool_call> and more"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        (HERMES, ' <tool_call> {"name": "weather", '),
        (HERMES, "a <tool_call> b "),
        (HERMES, f"<tool_call>{'[' * 10**5}</tool_call>"),
        (MISTRAL, "[TOOL_CALLS] weather(3)"),
        (MISTRAL, "[1, 2] are numbers"),
        (MISTRAL, "[TOOL"),
        (LLAMA, '{"answer": 42}\n'),
        (LLAMA, 'It is {"name": "weather", "parameters": {}}'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_call_stays_text(form, text, rng):
    assert parse_calls(form, NAMES, text) == Parsed(text)
    assert in_pieces(rng, form, text) == Parsed(text)


def test_a_call_whose_end_was_cut_off_after_its_json_is_a_call():
    assert parse_calls(HERMES, NAMES, '<tool_call>{"name": "weather", "arguments": {}}').calls == (
        ToolCall("weather", "{}"),
    )


def test_text_goes_out_as_soon_as_it_is_certain(rng):
    reader = CallReader(HERMES, NAMES)
    assert reader.feed("Let me <b") == Parsed("Let me <b")
    assert reader.feed(" see <tool") == Parsed(" see")
    assert reader.feed("_call>") == Parsed()
    assert reader.feed('{"name": "weather", "arguments": {}}\n</tool_call>') == Parsed("", (ToolCall("weather", "{}"),))


def test_the_form_is_that_of_the_template():
    assert form_of("{{ '<tool_call>\\n' }}") is HERMES
    assert form_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert form_of("{{ message.content }}") is LLAMA


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_under_the_grammar_any_walk_is_calls_that_meet_their_tools_schemas(grammars, tokenizer, name, many, rng):
    form = FORMS[name]
    for _ in range(4):
        grammar, ids = call_grammar(grammars, form, TOOLS, many=many), []
        while not grammar.ended:
            allowed = np.flatnonzero(np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little"))
            ids.append(0 if 0 in allowed else int(rng.choice(allowed)))
            assert grammar.accept(ids[-1:]) == 1
        text = tokenizer.decode([token for token in ids if token])
        found = parse_calls(form, NAMES, text)
        assert found.calls, text
        assert not found.text
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), {"weather": WEATHER, "send_mail": MAIL}[call.name])


A = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
UNTYPED = {
    "properties": A,
    "reference": {"$ref": "#/$defs/x", "$defs": {"x": A}},
    "anyOf": {"anyOf": [{"type": "integer"}, A]},
    "oneOf": {"oneOf": [{"type": "string"}, A]},
    "allOf": {"allOf": [A]},
    "enum": {"enum": [3, {"a": 1}, {"a": 2}]},
    "or null": {**A, "type": ["null", "object"]},
}
ANYTHING = {
    "none": {},
    "null": {"parameters": None},
    "empty": {"parameters": {}},
    "text": {"parameters": {"title": "t"}},
}


def encoded(tokenizer, text: str) -> list[int]:
    """With the special token that opens Mistral's calls."""
    special, rest = tokenizer._inner.token_to_id(MISTRAL.opening), text.removeprefix(MISTRAL.opening)
    return [*([special] if rest != text else []), *tokenizer.encode(rest)]


def may_follow(grammar, tokenizer, text: str) -> set[str]:
    """The characters that may follow `text`."""
    ids = encoded(tokenizer, text)
    assert grammar.accept(ids) == len(ids), text
    allowed = np.flatnonzero(np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little"))
    return {tokenizer.decode([token])[:1] for token in allowed}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", [*UNTYPED, *ANYTHING])
def test_arguments_are_an_object_whether_or_not_the_schema_says_so(grammars, tokenizer, form, name):
    function = {"name": "f", **ANYTHING.get(name, {"parameters": UNTYPED.get(name)})}
    grammar = call_grammar(grammars, form, [{"type": "function", "function": function}], many=False)
    text = written(form, [{"name": "f", "arguments": {"a": 2}}])
    before = text[: text.index('{"a"')]
    assert may_follow(grammar.copy(), tokenizer, before) == {"{"}
    ids = encoded(tokenizer, text)
    assert grammar.accept(ids) == len(ids)
    if name in UNTYPED:
        wrong = encoded(tokenizer, before + '{"b"')
        assert call_grammar(grammars, form, [{"function": function}]).accept(wrong) < len(wrong)


def test_a_named_tool_is_the_one_that_is_called(grammars, tokenizer):
    text = '<tool_call>\n{"name": "send_mail", "arguments": {"to": "ada"}}\n</tool_call>'
    ids = tokenizer.encode(text)
    assert call_grammar(grammars, HERMES, TOOLS, "send_mail").accept(ids) == len(ids)
    assert call_grammar(grammars, HERMES, TOOLS, "weather").accept(ids) < len(ids)


@pytest.mark.parametrize(
    ("tools", "name", "said"),
    [
        (TOOLS, "wether", "no tool 'wether'. Did you mean 'weather'"),
        ([], None, "there are no tools"),
        ([{"type": "function"}], None, "tools[0] is not a tool"),
        ([{"function": {"name": "f", "parameters": {"type": "text"}}}], None, "tool 'f', parameters: type is 'text'"),
        ([{"function": {"name": "f", "parameters": {"type": ["null"]}}}], None, "type is ['null']; must be 'object'"),
        ([{"function": {"name": "f", "parameters": {"const": 3}}}], None, "tool 'f', parameters: The JSON schema"),
    ],
    ids=["name", "none", "form", "type", "types", "schema"],
)
def test_tools_that_cannot_be_called_are_one_clear_message(grammars, tools, name, said):
    with pytest.raises(UserError, match=re.escape(said)):
        call_grammar(grammars, HERMES, tools, name)
