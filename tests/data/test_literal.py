"""No text has the tokens that open and end documents, whatever a tokenizer.json says of them and whatever its model."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from axon.data import Data, JsonLines, TokenizerFile
from axon.errors import UserError

LETTERS = [*"abcdefghijklmnopqrstuvwxyz<>/|_.:", "▁"]
BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(special: bool | None) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, special=bool(special), normalized=False) for token in ("<s>", "</s>")])
    return inner


def sentencepiece(special: bool | None) -> tokenizers.Tokenizer:
    """As Llama 2's: BPE of a normalised text with byte fallback, here with merges that make `<s>`."""
    names = ["<unk>", "<s>", "</s>", *BYTE_FALLBACK, *LETTERS, "<s", "</", "</s"]
    merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")]
    vocab = {name: number for number, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return declared(inner, special)


def unigram(special: bool | None) -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in LETTERS)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return declared(inner, special)


def declared(inner: tokenizers.Tokenizer, special: bool | None) -> tokenizers.Tokenizer:
    """None: of the model's vocabulary alone."""
    if special is not None:
        inner.add_tokens([AddedToken(token, special=special, normalized=False) for token in ("<s>", "</s>")])
    return inner


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram}
HOSTILE = ["so <s> it", "a</s></s>b", "<s>", "x <s><s", "</s> y", "no"]


@pytest.fixture(params=[(kind, special) for kind in KINDS for special in (True, False, None)], ids=str)
def file(request, tmp_path) -> TokenizerFile:
    kind, special = request.param
    KINDS[kind](special).save(str(tmp_path / "tokenizer.json"))
    return TokenizerFile(str(tmp_path / "tokenizer.json"), "<s>", ("</s>",))


def test_a_text_that_spells_what_opens_or_ends_documents_is_that_text(file):
    tokenizer = file.load()
    for text in HOSTILE:
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos, *tokenizer.ends} & set(ids), text
        assert tokenizer.visible(ids) == text
    assert tokenizer.byte_lengths[[tokenizer.bos, *tokenizer.ends]].tolist() == [0, 0]
    assert tokenizer.visible([tokenizer.bos, *tokenizer.encode("a b")]).strip() == "a b"


def test_ids_of_other_text_and_the_file_itself_are_as_they_were(file):
    tokenizer = file.load()
    inner = tokenizers.Tokenizer.from_file(file.path)
    for text in ("so it is", "a/b<c>s", " s>"):
        assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids
    assert json.loads(tokenizer.to_json()) == json.loads(inner.to_str())


def test_documents_are_as_many_as_their_borders(file, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in HOSTILE))
    corpus = Data(4, 1, (JsonLines(str(tmp_path / "a.jsonl")),), tokenizer=file, held_out=0).prepare(lambda _: None)
    tokens = corpus._sequences["train"].tokens_of(0)
    flat = tokens.read(np.array([0]), tokens.count)[0]
    assert np.count_nonzero(flat == corpus.tokenizer.bos) == len(HOSTILE)


def test_a_text_that_cannot_be_read_without_the_opening_token_is_refused_with_it(tmp_path):
    words = {"<unk>": 0, "§": 1, "a": 2}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a a a"}\n{"text": "a § a"}\n')
    file = TokenizerFile(str(tmp_path / "tokenizer.json"), "§")
    with pytest.raises(UserError, match=r"^a: .*'a § a' it makes '§', which opens or ends documents"):
        Data(2, 1, (JsonLines(str(tmp_path / "a.jsonl")),), tokenizer=file, held_out=0).prepare(lambda _: None)
