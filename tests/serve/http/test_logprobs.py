"""Tokens of a text: their bytes are the vocabulary's, and their parts of the text are the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.serve.detokenize import Detokenizer
from axon.serve.http.logprobs import ChatLogprobs, CompletionLogprobs
from axon.serve.request import TokenLogprob
from tests.serve.test_detokenize import TOKENIZERS

BYTE_LEVEL = TOKENIZERS["byte level"]
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("so it😀é漢")), max_size=12)


def scored(ids):
    return [TokenLogprob(token, -1.0, ((token, -1.0), (7, -2.0))) for token in ids]


def in_parts(data, ids):
    cuts = sorted(data.draw(st.lists(st.integers(0, max(0, len(ids) - 1)), max_size=4)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def chat_entries(tokenizer, prompt, parts):
    told = ChatLogprobs(tokenizer, prompt)
    found = [told.of(scored(part), "", ends=k == len(parts) - 1)["content"] for k, part in enumerate(parts)]
    return [one for part in found for one in part]


def streamed(detokenizer, parts):
    """The new ids and the new text of each event, with the last of which the text ends."""
    for k, part in enumerate(parts):
        text = detokenizer.push(part)
        ends = detokenizer.stopped or k == len(parts) - 1
        yield part, text + (detokenizer.finish() if ends else ""), ends
        if ends:
            return


@pytest.mark.parametrize("name", ["byte level", "Gemma", "Llama 2"])
@settings(max_examples=25)
@given(data=st.data())
def test_a_token_of_a_stream_comes_with_its_text_and_all_are_those_of_the_whole(name, data):
    tokenizer, text = TOKENIZERS[name], data.draw(TEXT)
    prompt, stop = tokenizer.prompt("so"), data.draw(st.sampled_from(["so", "it", "t so", "😀é"]))
    events = [*streamed(Detokenizer(tokenizer, prompt, (stop,)), [[one] for one in tokenizer.encode(text)])]
    chat, completion = ChatLogprobs(tokenizer, prompt), CompletionLogprobs(tokenizer, prompt, None)
    sent, content, tokens = "", [], []
    for ids, piece, ends in events:
        sent += piece
        content += chat.of(scored(ids), piece, ends)["content"]
        tokens += completion.of((), scored(ids), piece, opens=not tokens, ends=ends)["tokens"]
        told = "".join(one["token"] for one in content)
        assert told.startswith(sent) if ends else sent.startswith(told)
    ids = [one for part, _, _ in events for one in part]
    assert content == chat_entries(tokenizer, prompt, [ids] if ids else [])
    assert tokens == [one["token"] for one in content]


@pytest.mark.parametrize("name", ["byte level", "Gemma", "Llama 2"])
@settings(max_examples=25)
@given(data=st.data())
def test_bytes_and_texts_of_tokens_joined_are_the_text(name, data):
    tokenizer, text = TOKENIZERS[name], data.draw(TEXT)
    prompt, ids = tokenizer.prompt("so"), tokenizer.encode(text)
    entries = chat_entries(tokenizer, prompt, in_parts(data, ids))
    whole = tokenizer.continuation(prompt, ids)
    assert bytes(byte for one in entries for byte in one["bytes"]) == whole.encode()
    assert "".join(one["token"] for one in entries) == whole


@settings(max_examples=40)
@given(data=st.data())
def test_any_ids_join_to_the_text_that_is_given(data):
    ids = st.lists(st.integers(1, BYTE_LEVEL.vocab + 1), min_size=1, max_size=8)
    prompt, new = data.draw(ids), data.draw(ids)
    entries = chat_entries(BYTE_LEVEL, prompt, in_parts(data, [*new, BYTE_LEVEL.bos]))
    alone = BYTE_LEVEL.visible(new)
    assert "".join(one["token"] for one in entries) == alone
    assert entries[-1]["bytes"] == []
    echoed = BYTE_LEVEL.decode(prompt)
    found = CompletionLogprobs(BYTE_LEVEL, prompt, echoed).of(
        scored(prompt[1:]), scored(new), "", opens=True, ends=True
    )
    assert "".join(found["tokens"]) == echoed + alone
    assert found["text_offset"] == [len("".join(found["tokens"][:k])) for k in range(len(prompt) + len(new))]
    assert all(token in top for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


@pytest.mark.parametrize("name", ["byte level", "Gemma", "Llama 2"])
def test_the_bytes_of_an_emoji_are_its_tokens_own(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("\N{CRYING CAT FACE}")
    entries = chat_entries(tokenizer, tokenizer.prompt("so"), [ids])
    assert [one["token"] for one in entries] == [""] * (len(ids) - 1) + ["\N{CRYING CAT FACE}"]
    assert all(one["bytes"] for one in entries)


def test_an_echoed_prompt_has_special_tokens_where_its_text_has_them():
    bos = BYTE_LEVEL.bos
    for ids, text in ([[bos, 70], "<|endoftext|>" + BYTE_LEVEL.decode([70])], [[bos, 70], BYTE_LEVEL.decode([70])]):
        found = CompletionLogprobs(BYTE_LEVEL, ids, text).of(scored(ids[1:]), (), "", opens=True, ends=True)
        assert "".join(found["tokens"]) == text


def test_likely_tokens_that_read_the_same_are_told_apart():
    parts = [token for token in range(BYTE_LEVEL.vocab) if BYTE_LEVEL.bytes_of(token) in (b"\xf0", b"\xf1", b"\xf2")]
    one = TokenLogprob(parts[0], -1.0, tuple((token, -1.0 - k) for k, token in enumerate(parts)))
    found = CompletionLogprobs(BYTE_LEVEL, [0], None).of((), [one], "", opens=True, ends=False)
    assert found["top_logprobs"] == [{"": -1.0, f"token_id:{parts[1]}": -2.0, f"token_id:{parts[2]}": -3.0}]


def test_the_first_word_of_a_text_has_no_space_where_the_decoder_drops_it():
    tokenizer = TOKENIZERS["Llama 2"]
    ids = tokenizer.encode(" it was")
    assert "".join(one["token"] for one in chat_entries(tokenizer, [tokenizer.bos], [ids])) == tokenizer.visible(ids)
