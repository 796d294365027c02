"""Preparing: documents into splits by their hash, tokens and counts exact, done once."""

import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from axon.data import Bpe, Data, Folder, JsonLines, Synthetic, TokenizerFile, records
from axon.data import prepare as module
from axon.data.prepare import SPLITS, documents, train_tokenizer, write_tokens
from axon.data.records import files_below
from axon.data.store import Root
from axon.data.tokenizer import BOS, read_tokenizer
from axon.data.tokens import open_tokens
from axon.errors import UserError

decode = json.loads


@pytest.fixture
def said():
    return []


@pytest.fixture
def source(folder):
    return Folder(str(folder("words", 300)))


def documents_in(root, stored, split, tokenizer):
    tokens = open_tokens(root, f"{stored.part}/{split}", stored.splits[split], tokenizer.vocab)
    flat = tokens.read(np.array([0]), tokens.count)[0]
    starts = np.flatnonzero(flat == tokenizer.bos)
    return [tokenizer.decode(ids[1:]) for ids in np.split(flat, starts)[1:]]


def test_the_store_holds_every_document_in_order_in_the_split_of_its_hash(source, said):
    root = Root(None)
    tokenizer = train_tokenizer(Bpe(300), [source], 0.3, root, said.append)
    stored = write_tokens(source, tokenizer, 0.3, root, said.append)
    for split in SPLITS:
        expected = [one for one in documents(source, 0.3) if one.split == split]
        assert documents_in(root, stored, split, tokenizer) == [one.text for one in expected]
        counts = stored.splits[split]
        assert counts["documents"] == len(expected) > 30
        assert counts["bytes"] == counts["token_bytes"] == sum(len(one.text.encode()) for one in expected)


def test_the_block_size_changes_nothing(source, said, monkeypatch):
    root = Root(None)
    tokenizer = train_tokenizer(Bpe(300), [source], 0.3, root, said.append)
    whole = write_tokens(source, tokenizer, 0.3, Root("memory://a"), said.append)
    monkeypatch.setattr(module, "BLOCK", 500)
    assert write_tokens(source, tokenizer, 0.3, Root("memory://b"), said.append).splits == whole.splits


def test_a_document_stays_in_its_split_when_others_come_and_go(texts):
    class Given:
        name = "given"

        def __init__(self, texts):
            self.texts = lambda: iter(texts)

        def key(self):
            return ""

    written = texts(400)
    every = {one.text: one.split for one in documents(Given(written), 0.2)}
    some = {one.text: one.split for one in documents(Given(written[::-3]), 0.2)}
    assert some.items() <= every.items()
    more = {one.text: one.split for one in documents(Given(written), 0.4)}
    assert {text for text in every if every[text] == "held_out"} <= {text for text in more if more[text] == "held_out"}
    assert 0.1 < sum(split == "held_out" for split in every.values()) / 400 < 0.3


def test_the_second_time_all_is_reused(source, said):
    for _ in range(2):
        tokenizer = train_tokenizer(Bpe(300), [source], 0.1, Root(None), said.append)
        write_tokens(source, tokenizer, 0.1, Root(None), said.append)
    assert said[0].startswith("tokenizer: training a BPE of 300 on 0.")
    assert re.search(r"trained in \d+\.\d s", said[1])
    assert re.search(r"written in \d+\.\d s", said[2])
    assert all("reused" in line for line in said[3:])
    assert len(said) == 5


def test_changed_text_is_prepared_anew(source, said, tmp_path):
    tokenizer = train_tokenizer(Bpe(300), [source], 0.1, Root(None), said.append)
    before = write_tokens(source, tokenizer, 0.1, Root(None), said.append)
    (tmp_path / "words" / "0003.txt").write_text("quite another text")
    after = write_tokens(source, tokenizer, 0.1, Root(None), said.append)
    assert after.part != before.part
    assert after.splits != before.splits


def test_another_share_held_out_or_tokenizer_is_another_store(source, said):
    root = Root(None)
    stores = [
        write_tokens(source, train_tokenizer(Bpe(vocab), [source], 0.1, root, said.append), share, root, said.append)
        for vocab, share in [(300, 0.1), (310, 0.1), (300, 0.2)]
    ]
    assert len({stored.part for stored in stores}) == 3


def test_the_tokenizer_never_sees_what_is_held_out(tmp_path, said):
    class Seen(Bpe):
        def train(self, texts, report=print):
            self_seen.extend(texts)
            return Bpe(300).train(iter(self_seen))

    self_seen: list[str] = []
    source = Synthetic(documents=200, length=5)
    train_tokenizer(Seen(300), [source], 0.3, Root(None), said.append)
    assert self_seen == [one.text for one in documents(source, 0.3) if one.split == "train"]


def test_the_tokenizer_is_fitted_to_no_more_than_its_sample_of_each_source(said):
    sources = [Synthetic(documents=100, length=20, seed=seed) for seed in (1, 2)]
    tokenizer = train_tokenizer(Bpe(280, sample=4000), sources, 0.0, Root(None), said.append)
    lengths = [[one.bytes for one in documents(source, 0.0)] for source in sources]
    heads = [int(np.searchsorted(np.cumsum(sizes), 2000)) + 1 for sizes in lengths]
    texts = [text for source, head in zip(sources, heads, strict=True) for text in list(source.texts())[:head]]
    assert tokenizer.to_json() == Bpe(280).train(iter(texts)).to_json()


def test_the_stored_tokenizer_is_a_file_like_any_other(said, source, cache, tmp_path):
    tokenizer = train_tokenizer(Bpe(300), [source], 0.0, Root(None), said.append)
    (file,) = cache.glob("tokenizers/*/*/tokenizer.json")
    assert str(file) in said[-1]
    shutil.copy(file, tmp_path / "elsewhere.json")
    assert tokenizers.Tokenizer.from_file(str(file)).get_vocab_size() == tokenizer.vocab
    assert TokenizerFile(str(tmp_path / "elsewhere.json")).load().to_json() == tokenizer.to_json()


def test_the_end_of_a_source_of_one_document_is_held_out(tmp_path):
    lines = [f"line {number} of {number * number}" for number in range(200)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    (tmp_path / "one.txt").write_text("x" * 1000)
    for name, held_out in [("all.txt", 0.1), ("one.txt", 0.25), ("all.txt", 0.9)]:
        train, end = documents(Folder(str(tmp_path / name)), held_out)
        assert (train.split, end.split) == ("train", "held_out")
        assert train.text + end.text == (tmp_path / name).read_text()
        assert abs(end.bytes / (train.bytes + end.bytes) - held_out) < 0.02
    assert end.text.startswith("line ")
    for held_out in (0.0, 1.0):
        assert len(list(documents(Folder(str(tmp_path / "all.txt")), held_out))) == 1


def test_a_vocabulary_that_the_text_cannot_fill_is_said(said):
    train_tokenizer(Bpe(8192), [Synthetic(3, 3, 3)], 0.0, Root(None), said.append)
    assert "8,192 requested" in said[-1]


def test_large_vocabularies_take_wider_tokens(said, source, monkeypatch):
    root = Root(None)
    tokenizer = train_tokenizer(Bpe(300), [source], 0.1, root, said.append)
    narrow = write_tokens(source, tokenizer, 0.1, root, said.append)
    assert root.array(f"{narrow.part}/train", open=True).dtype.name == "uint16"
    tokenizer.vocab = 2**16 + 1
    wide = write_tokens(source, tokenizer, 0.1, Root("memory://"), said.append)
    assert wide.splits["train"]["tokens"] == narrow.splits["train"]["tokens"]


def test_a_tokenizer_that_loses_bytes_is_said_so_each_time(tmp_path, said, source):
    inner = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>"]
    inner.train_from_iterator(["a b c"], trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(str(tmp_path / "tokenizer.json")).load()
    for _ in range(2):
        write_tokens(source, tokenizer, 0.1, Root(None), said.append)
    assert sum("bits per byte will be off by +" in line for line in said) == 2


def test_text_that_is_not_utf8_is_replaced_and_counted_each_time(tmp_path, said):
    texts = {"good": "naïve".encode(), "latin": "na\xefve".encode("latin-1"), "torn": "漢字".encode()[:-1]}
    for name, raw in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(raw)
    source = Folder(str(tmp_path))
    found = {one.text: one.replaced for one in documents(source, 0.0)}
    assert found == {"naïve": False, "na\ufffdve": True, "漢\ufffd": True}
    for _ in range(2):
        write_tokens(source, Bpe(300).train(iter(["a"])), 0.1, Root(None), said.append)
    assert sum("2 of 3 documents are not UTF-8 throughout" in line for line in said) == 2


def test_lone_surrogates_that_json_can_spell_are_replaced_and_counted(tmp_path):
    given = ["fine \ud800 still", "\udfff\udcff", "\ud83d\ude42"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    source = JsonLines(str(tmp_path / "a.jsonl"))
    expected = [("fine \ufffd still", 14, True), ("\ufffd\ufffd", 6, True), ("🙂", 4, False)]
    assert [(one.text, one.bytes, one.replaced) for one in documents(source, 0.0)] == expected


def test_an_empty_source_is_refused(tmp_path, said):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="has no documents with text"):
        train_tokenizer(Bpe(300), [Folder(str(tmp_path))], 0.1, Root(None), said.append)


def test_long_work_says_how_far_it_is(source, said, monkeypatch):
    tokenizer = train_tokenizer(Bpe(300), [source], 0.1, Root(None), said.append)
    monkeypatch.setattr(module, "BLOCK", 500)
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)
    write_tokens(source, tokenizer, 0.1, Root(None), said.append)
    assert sum("documents so far" in line for line in said) > 3


@pytest.mark.parametrize("harm", [lambda raw: raw[: len(raw) // 2], lambda raw: b"\xff" + raw, lambda raw: b"{}"])
@pytest.mark.parametrize("part", ["tokenizers", "tokens"])
def test_what_was_prepared_and_is_damaged_says_which_folder_to_delete(folder, said, cache, part, harm):
    source = Folder(str(folder("words", 40)))

    def prepare():
        tokenizer = train_tokenizer(Bpe(300), [source], 0.3, Root(None), said.append)
        return write_tokens(source, tokenizer, 0.3, Root(None), said.append)

    before = prepare()
    (stored,) = (cache / part).iterdir()
    (file,) = stored.glob("*.json")
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(UserError, match=f"^{stored} cannot be read: .*delete that folder"):
        prepare()
    shutil.rmtree(stored)
    assert prepare().splits == before.splits


def test_a_tokenizer_that_cannot_encode_a_text_is_the_persons_to_change(tmp_path, said, source):
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(str(tmp_path / "tokenizer.json")).load()
    with pytest.raises(UserError, match=r"The tokenizer cannot encode this text: .*Missing \[UNK\]"):
        write_tokens(source, tokenizer, 0.1, Root(None), said.append)


def test_a_source_with_a_very_long_name_is_stored(tmp_path, said):
    (tmp_path / ("x" * 250)).write_text("some text")
    write_tokens(Folder(str(tmp_path / ("x" * 250))), Bpe(300).train(iter(["a"])), 0.1, Root(None), said.append)
    assert "written in" in said[-1]


def test_a_folder_is_listed_once_and_a_tokenizer_parsed_once(source, monkeypatch):
    listed, parsed = [], []
    monkeypatch.setattr(records, "files_below", lambda *given: listed.append(given) or files_below(*given))
    corpus = Data(16, 2, (source,), tokenizer=Bpe(300), held_out=0.3).prepare(lambda _: None)
    assert len(listed) == 1
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or decode(text))
    read_tokenizer(corpus.tokenizer.to_json(), BOS)
    assert len(parsed) == 1
