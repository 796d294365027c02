"""Tokenizers: exact both ways, exact in bytes, and clear about files they cannot use."""

import json
import random
import re
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from axon.data import Bpe, TokenizerFile
from axon.data import tokenizer as module
from axon.errors import UserError


def anything(length: int) -> str:
    """Random characters of all of Unicode but the surrogates."""
    points = [random.choice([random.randrange(128), random.randrange(sys.maxunicode)]) for _ in range(length)]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


@pytest.fixture
def trained(texts):
    return Bpe(vocab=400).train(iter(texts(200)))


def test_byte_lengths_sum_to_the_bytes_of_the_text(trained, texts):
    for text in [anything(300) for _ in range(20)] + texts(20):
        assert trained.byte_lengths[trained.encode(text)].sum() == len(text.encode())


def test_decoding_gives_the_text_back(trained, texts):
    for text in [anything(300) for _ in range(20)] + texts(20):
        assert trained.decode(trained.encode(text)) == text


def test_a_batch_is_encoded_as_one_by_one(trained, texts):
    written = texts(30)
    assert trained.encode_batch(written) == [trained.encode(text) for text in written]


def test_only_we_place_the_special_token(trained):
    text = "a<|endoftext|>b"
    assert trained.bos not in trained.encode(text)
    assert trained.decode(trained.encode(text)) == text
    assert trained.byte_lengths[trained.bos] == 0
    assert trained.decode([trained.bos]) == "<|endoftext|>"


def test_vocab_counts_the_ids(trained):
    assert trained.vocab == 400 == len(trained.byte_lengths)
    assert Bpe(vocab=8192).train(iter(["abab"])).vocab == 257 + 2  # "ab", "abab"


def test_a_saved_tokenizer_is_the_same_when_loaded(trained, tmp_path, texts):
    trained.save(tmp_path / "tokenizer.json")
    loaded = TokenizerFile(str(tmp_path / "tokenizer.json")).load()
    assert (loaded.vocab, loaded.bos) == (trained.vocab, trained.bos)
    assert np.array_equal(loaded.byte_lengths, trained.byte_lengths)
    written = texts(20)
    assert loaded.encode_batch(written) == trained.encode_batch(written)


def test_a_sentencepiece_tokenizer_counts_spaces_and_byte_tokens(tmp_path):
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["so it is as it was", "it was so"], trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = description["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = TokenizerFile(str(tmp_path / "tokenizer.json")).load()
    for text in ("it was so", "was 漢 it", "as é is"):
        assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_a_tokenizer_file_that_cannot_be_used_says_why(tmp_path, trained):
    trained.save(tmp_path / "good.json")
    (tmp_path / "torn.json").write_text(trained.to_json()[:500])
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "latin.json").write_bytes(b"caf\xe9")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for file, said in [
        (TokenizerFile(str(tmp_path / "none.json")), "There is no file or folder .*none.json"),
        (TokenizerFile(str(tmp_path)), "cannot be read: Is a directory"),
        (TokenizerFile(str(tmp_path / "latin.json")), "latin.json cannot be read: it is not UTF-8"),
        (TokenizerFile(str(tmp_path / "deep.json")), "deep.json: it is not a tokenizer.json"),
        (TokenizerFile(str(tmp_path / "torn.json")), "it is not a tokenizer.json"),
        (TokenizerFile(str(tmp_path / "other.json")), "is not a tokenizer.json"),
        (TokenizerFile(str(tmp_path / "good.json"), bos="<|endoftxt|>"), r"Did you mean '<\|endoftext\|>'"),
    ]:
        with pytest.raises(UserError, match=said):
            file.load()
    with pytest.raises(UserError, match=r"TokenizerFile\.path is ''"):
        TokenizerFile("")


@pytest.mark.parametrize("fields", [{"vocab": 256}, {"vocab": 2**64}, {"vocab": 2**28}, {"sample": 0}])
def test_a_bpe_that_cannot_be_is_refused(fields):
    with pytest.raises(UserError, match=f"Bpe.{next(iter(fields))}"):
        Bpe(**fields)


@pytest.mark.few(unbroken=("abcdefghij", " "))
@pytest.mark.parametrize("unbroken", ["abcdefghij", "0123456789", "+-*/!?%&", " "])
def test_one_unbroken_word_takes_no_longer_to_train_on_than_many(unbroken):
    said = []
    tokenizer = Bpe(2000).train(iter(["".join(random.choices(unbroken, k=200_000))]), said.append)
    assert "words of 1,024 characters and more" in said[-1]
    text = "".join(random.choices(unbroken, k=5000))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_without_long_words_is_trained_on_as_it_is(texts):
    said = []
    written = [*texts(20), "漢字，" * 2000, "a1+" * 2000]  # unbroken, but not one word
    Bpe(400).train(iter(written), said.append)
    assert len(said) == 1


def test_pieces_change_nothing_where_no_word_is_cut(texts, monkeypatch):
    written = texts(100)
    plain = Bpe(500).train(iter(written))
    monkeypatch.setattr(module, "_UNBROKEN", re.compile(""))
    monkeypatch.setattr(module, "_LONG_WORD", re.compile(""))
    assert Bpe(500).train(iter(written)).to_json() == plain.to_json()


def with_template(trained, tmp_path, pair="$A $B:1"):
    """A file whose template puts `<|endoftext|>` before a text, and joins two as `pair`."""
    inner = tokenizers.Tokenizer.from_str(trained.to_json())
    inner.add_special_tokens(["<end>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair=pair, special_tokens=[("<|endoftext|>", trained.bos)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_prompt_has_the_special_tokens_of_the_template(trained, tmp_path):
    path = with_template(trained, tmp_path)
    ours, theirs = TokenizerFile(path).load(), TokenizerFile(path, prompts="template").load()
    assert ours.prompt("ab") == theirs.prompt("ab") == [trained.bos, *trained.encode("ab")]
    assert theirs.prompt("a<end>b")[2] == theirs.vocab - 1  # as `transformers` reads it
    assert theirs.vocab - 1 not in theirs.encode("a<end>b")


def test_two_texts_are_joined_by_a_template_that_has_a_token_between_them(trained, tmp_path):
    path = with_template(trained, tmp_path, "<|endoftext|> $A <|endoftext|>:1 $B:1")
    first, second = (trained.encode(text) for text in ("a b", "c"))
    ids, types = TokenizerFile(path, prompts="template").load().pair("a b", "c")
    assert ids == [trained.bos, *first, trained.bos, *second]
    assert types == [0] * (1 + len(first)) + [1] * (1 + len(second))
    with pytest.raises(UserError, match=r"TokenizerFile\.prompts = 'template'"):
        TokenizerFile(path).load().pair("a b", "c")
    for pair in ("$A $B:1", "<|endoftext|> $A $B:1"):  # the first is what `tokenizers` has where a file says none
        with pytest.raises(UserError, match="no token between the two texts"):
            TokenizerFile(with_template(trained, tmp_path, pair), prompts="template").load().pair("a b", "c")


def test_text_ends_at_the_tokens_that_end_it(trained, tmp_path, texts):
    path = with_template(trained, tmp_path)
    text = "so it is"
    for ends, shown in ((None, text), (("<end>",), text + text), ((), text + text + text)):
        tokenizer = TokenizerFile(path, ends=ends).load()
        ids = tokenizer.encode(text)
        generated = [*ids, tokenizer.bos, *ids, tokenizer.vocab - 1, *ids]
        assert tokenizer.continuation(tokenizer.prompt("x"), generated) == shown
    with pytest.raises(UserError, match="it has no token '<stop>' to end texts with"):
        TokenizerFile(path, ends=("<stop>",)).load()
