"""Text in pieces: together what the whole ids are, for tokenizers of every kind, any ids and any split."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from axon.data import Bpe
from axon.data.tokenizer import Tokenizer, read_tokenizer
from axon.serve.detokenize import Detokenizer

TEXTS = ("so it is as it was, it was so; a漢字ß é.", "🙂🙂🏽👩‍👩‍👧 e\u0301 o\u0308\ufffd end stop STOP</s>")
WORDS = ["▁it", "▁", "so", "▁was", "a", ".", "stop", "op", "st", "▁漢", "字", "\ufffd", "END", "▁▁", "x</w>", "##y"]


def byte_level() -> Tokenizer:
    return Bpe(vocab=300).train(iter(TEXTS * 3), lambda line: None)


def spelled(decoder) -> Tokenizer:
    """A vocabulary of words, bytes and a special token, with one of the decoders that published ones have."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + place for place, word in enumerate(WORDS)}
    vocab |= {f"<0x{byte:02X}>": 3 + len(WORDS) + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoder
    inner.add_special_tokens(["<s>", "</s>", "<pad>"])
    inner.add_tokens([" added"])
    return read_tokenizer(inner.to_str(), "<s>", ["</s>"])


def llama(*more):
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


TOKENIZERS = {
    "byte level": byte_level(),
    "Llama 2": spelled(llama(decoders.Strip(" ", 1, 0))),
    "Gemma": spelled(llama()),
    "Metaspace": spelled(decoders.Metaspace()),
    "Metaspace after bytes": spelled(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "WordPiece": spelled(decoders.WordPiece()),
    "BPE with word ends": spelled(decoders.BPEDecoder()),
}


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The definition: up to the stop text that is complete first, the longer of two; and whether there is one."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def pieces(tokenizer, prompt, parts, stops=()):
    """What each part gives, and the rest; and the detokenizer."""
    one = Detokenizer(tokenizer, prompt, stops)
    return [*(one.push(part) for part in parts), one.finish()], one


def ids_of(data, tokenizer):
    """Of a text, of anything, or of bytes alone, with a special token or one beyond the vocabulary here and there."""
    own = data.draw(st.sampled_from([range(tokenizer.vocab + 2), sorted(tokenizer.byte_tokens) or range(1, 257)]))
    some = st.lists(st.one_of(st.sampled_from(own), st.integers(0, min(tokenizer.vocab, 20))), max_size=12)
    texts = st.text(st.sampled_from([*"".join(TEXTS), "\x80", "\U0010ffff"]), max_size=12)
    return data.draw(st.one_of(some, texts.map(tokenizer.encode), some.flatmap(lambda a: some.map(lambda b: a + b))))


def split(data, ids):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def check_any(tokenizer, data):
    prompt, ids = ids_of(data, tokenizer), ids_of(data, tokenizer)
    whole = tokenizer.continuation(prompt, ids)
    part = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda at: st.integers(at + 1, at + 5).map(lambda end: whole[at:end] or "so")
    )
    stops = tuple(data.draw(st.lists(st.one_of(part, st.sampled_from(["stop", "st", "\ufffd", " "])), max_size=3)))
    found, one = pieces(tokenizer, prompt, split(data, ids), stops)
    assert ("".join(found), one.stopped) == cut(whole, stops)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
@settings(max_examples=15)
def test_the_pieces_are_the_continuation_up_to_the_first_stop_text(name, data):
    check_any(TOKENIZERS[name], data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
@settings(max_examples=20_000)
def test_the_pieces_of_many_texts_are_the_continuation(name, data):
    check_any(TOKENIZERS[name], data)


def test_a_character_comes_with_its_last_byte():
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer._inner.token_to_id(letter) for letter in "ðŁĻĤ"]
    assert tokenizer.decode(ids) == "🙂"
    one = Detokenizer(tokenizer, [tokenizer.bos])
    assert [one.push([token]) for token in ids] == ["", "", "", "🙂"]
    assert [one.push(ids[:2]), one.push(tokenizer.encode("a"))] == ["", "\ufffda"]
    assert [one.push(ids[:3]), one.finish()] == ["", "\ufffd"]


def test_byte_tokens_are_text_when_another_follows():
    tokenizer = TOKENIZERS["Llama 2"]
    ids = [tokenizer._inner.token_to_id(f"<0x{byte:02X}>") for byte in "漢".encode()]
    word = tokenizer._inner.token_to_id("▁it")
    one = Detokenizer(tokenizer, [tokenizer.bos])
    assert [one.push([token]) for token in (word, *ids, word)] == ["it", "", "", "", "漢 it"]
    assert [one.push([word, *ids]), one.finish()] == [" it", "漢"]


def test_what_may_begin_a_stop_text_waits_until_it_does_not():
    tokenizer = TOKENIZERS["byte level"]
    one = Detokenizer(tokenizer, [tokenizer.bos], ("abab!", "!?"))
    found = [one.push(tokenizer.encode(letter)) for letter in "xabababc!abab"]
    assert found == ["x", "", "", "", "", "ab", "", "ababc", "", "!", "", "", ""]
    assert [one.push(tokenizer.encode(" ")), one.stopped] == ["abab ", False]
    assert [one.push(tokenizer.encode("ends abab! and more")), one.stopped] == ["ends ", True]
    assert [one.push(tokenizer.encode("more")), one.finish()] == ["", ""]


def test_an_id_that_ends_texts_ends_this_one():
    tokenizer = TOKENIZERS["Gemma"]
    word, end = (tokenizer._inner.token_to_id(name) for name in ("▁it", "</s>"))
    one = Detokenizer(tokenizer, [tokenizer.bos])
    assert [one.push([word, end, word]), one.push([word]), one.finish()] == [" it", "", ""]
    assert not one.stopped
    other = Detokenizer(tokenizer, [tokenizer.bos], ends=frozenset([word]))
    assert other.push([*tokenizer.encode("a"), end, *tokenizer.encode("a"), word, end]) == "aa"


def test_a_stop_text_among_the_least_tokens_is_text():
    tokenizer = TOKENIZERS["byte level"]
    ids = [token for letter in "xabxabab" for token in tokenizer.encode(letter)]
    for least, text in ((2, "x"), (3, "xabx"), (6, "xabxab"), (8, "xabxabab")):
        one = Detokenizer(tokenizer, [tokenizer.bos], ("ab",), min_tokens=least)
        assert one.push(ids) + one.finish() == text


@pytest.mark.parametrize("name", ["byte level", "Llama 2"])
@pytest.mark.parametrize("kind", ["words", "wrong bytes"])
def test_a_token_costs_the_same_however_long_the_text(name, kind, monkeypatch):
    tokenizer = TOKENIZERS[name]
    wrong = tokenizer._inner.token_to_id("<0xFF>" if name == "Llama 2" else "ÿ")
    ids = [wrong] * 3000 if kind == "wrong bytes" else tokenizer.encode("it was so ") * 600
    decoded = []
    visible = Tokenizer.visible
    monkeypatch.setattr(Tokenizer, "visible", lambda self, ids: (decoded.append(len(ids)), visible(self, ids))[1])
    found, _ = pieces(tokenizer, tokenizer.encode("so") * 5000, [[token] for token in ids])
    assert "".join(found)
    assert sum(decoded) < 20 * len(ids)
