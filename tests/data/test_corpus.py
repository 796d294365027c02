"""The whole way from a `Data` to its batches: exact continuation, hosts, splits, and a person's mistakes."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from axon.data import Bpe, Data, Folder, Synthetic, TokenizerFile, tokens
from axon.errors import UserError
from axon.train.objective import NextToken

SMALL = Bpe(vocab=300)


def quiet(line: str) -> None:
    """Drops a report."""


def same(one, two) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def take(batches, count: int) -> list:
    with batches:
        return [next(batches) for _ in range(count)]


@pytest.fixture
def data(folder):
    sources = (Folder(str(folder("first", 120))), Folder(str(folder("second", 60))))
    return Data(seq=32, batch=8, sources=sources, tokenizer=SMALL, held_out=0.2)


@pytest.fixture
def corpus(data):
    return data.prepare(quiet)


@pytest.mark.parametrize("weights", [None, (3.0, 1.0)])
def test_batches_continue_exactly_from_any_step(data, weights):
    corpus = Data(data.seq, data.batch, data.sources, weights, SMALL, 0.2).prepare(quiet)
    whole = take(corpus.train(seed=4), 300)  # several epochs
    for start in random.sample(range(290), 4):
        again = take(corpus.train(seed=4, start=start), 10)
        assert all(same(one, two) for one, two in zip(again, whole[start:], strict=False))


def test_batches_are_the_same_from_a_corpus_prepared_elsewhere(data, tmp_path):
    elsewhere = Data(data.seq, data.batch, data.sources, None, SMALL, 0.2, store=str(tmp_path / "b"), threads=1)
    remote = Data(data.seq, data.batch, data.sources, None, SMALL, 0.2, store="memory://bucket/a")
    first, *others = [take(one.prepare(quiet).train(7), 5) for one in (data, elsewhere, remote)]
    for other in others:
        assert all(same(one, two) for one, two in zip(first, other, strict=True))


def stored_files(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.rglob("*")) if path.is_file() and path.stat().st_size]


def check_flips(data: Data, cache: Path, flips: list[Path]) -> None:
    for path in flips:
        raw = path.read_bytes()
        place = random.randrange(len(raw))
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1 :])
        store = "/".join(path.relative_to(cache).parts[:2])
        with pytest.raises(UserError, match=f"^{cache}/{store} cannot be read: .*delete that folder"):
            data.prepare(quiet)
        path.write_bytes(raw)


def test_a_flipped_bit_in_any_file_of_a_token_store_is_found_when_it_is_opened(data, cache):
    corpus = data.prepare(quiet)
    found = stored_files(cache)
    assert {path.name for path in found} == {"tokenizer.json", "manifest.json", "zarr.json", "0"}
    check_flips(data, cache, found)
    assert same(take(data.prepare(quiet).train(0), 1)[0], take(corpus.train(0), 1)[0])


@pytest.mark.full
def test_many_flipped_bits_of_a_token_store_are_found_one_by_one(data, cache):
    data.prepare(quiet)
    found = stored_files(cache)
    check_flips(data, cache, random.choices(found, [path.stat().st_size for path in found], k=24) + found)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_shard_found_damaged_while_reading_is_said_as_it_is(data, cache, monkeypatch, threads):
    monkeypatch.setattr(tokens, "CHECKED_AT_ONCE", 0)
    data.prepare(quiet)
    for shard in cache.glob("tokens/first-*/part-*/train/c/0"):
        raw = shard.read_bytes()
        shard.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    damaged = replace(data, threads=threads).prepare(quiet)
    with pytest.raises(UserError, match=rf"{cache}/tokens/first-\w+ cannot be read: DATA_LOSS: .*delete that folder"):
        take(damaged.train(0), 50)


def test_another_seed_is_another_order(corpus):
    one, two = (take(corpus.train(seed), 1)[0] for seed in (0, 1))
    assert not np.array_equal(one["tokens"], two["tokens"])


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_hosts_slices_make_up_the_global_batch(corpus, split):
    def batches(sequences):
        return (
            take(corpus.train(3, sequences=sequences), 6)
            if split == "train"
            else list(corpus.held_out(sequences=sequences))
        )

    cuts = [slice(0, 2), slice(2, 3), slice(3, 8)]
    for whole, *parts in zip(batches(slice(None)), *map(batches, cuts), strict=True):
        assert same(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})


def test_held_out_documents_never_appear_in_training(seed):
    source = Synthetic(vocab=5000, documents=600, length=4, seed=seed)
    corpus = Data(256, 4, (source,), tokenizer=SMALL, held_out=0.2).prepare(quiet)

    def documents(batches):
        """The documents that lie whole in a sequence."""
        sequences = np.concatenate([batch["tokens"][batch["weights"][:, 0] > 0] for batch in batches])
        return {
            text for sequence in sequences for text in corpus.tokenizer.decode(sequence).split("<|endoftext|>")[1:-1]
        }

    epoch = corpus.describe()["train"]["synthetic"]["sequences"] // 4 + 1
    training, held = documents(take(corpus.train(0), epoch)), documents(corpus.held_out())
    assert len(training) > 100
    assert len(held) > 20
    assert not training & held
    assert training | held <= set(source.texts())


def test_held_out_batches_are_the_same_every_time_and_can_be_cut_short(corpus):
    whole = list(corpus.held_out())
    assert all(same(one, two) for one, two in zip(whole, corpus.held_out(), strict=True))
    assert len(list(corpus.held_out(2))) == 2 < len(whole)
    assert all(same(one, two) for one, two in zip(corpus.held_out(2), whole, strict=False))
    assert len(list(corpus.held_out(10**6))) == len(whole)


def test_bits_per_byte_has_every_byte_of_the_held_out_sequences(corpus):
    lengths = corpus.tokenizer.byte_lengths
    counted = sum(int((lengths[one["targets"]] * one["weights"]).sum()) for one in corpus.held_out())
    stored = sum(one["bytes"] for one in corpus.describe()["held_out"].values())
    assert (
        stored - 2 * 33 * lengths.max() <= counted <= stored
    )  # what is missing is each source's tail, under one sequence


def test_description_adds_up(corpus, data):
    described = corpus.describe()
    for number, (name, files) in enumerate([("first", 120), ("second", 60)]):
        splits = [described[split][name] for split in ("train", "held_out")]
        assert sum(one["documents"] for one in splits) == files
        texts = [path.read_bytes() for path in Path(data.sources[number].path).glob("*.txt")]
        assert sum(one["bytes"] for one in splits) == sum(map(len, texts))


def test_position_names_the_sequences_of_the_batch(corpus):
    said = corpus.position(seed=4, step=30)
    assert said.startswith("batch 30 of seed 4: ")
    batch = take(corpus.train(4, start=30), 1)[0]
    listed = {
        name: [int(number) for number in part.split(") sequences ")[1].split(", ")]
        for part in said.removeprefix("batch 30 of seed 4: ").split("; ")
        for name in ("first", "second")
        if part.startswith(name)
    }
    assert sum(map(len, listed.values())) == 8
    sources = list(corpus.describe()["train"])
    read = [
        corpus._sequences["train"].read(np.array(sequences) + corpus._sequences["train"].span(sources.index(name))[0])
        for name, sequences in listed.items()
    ]
    found = sorted(map(tuple, np.concatenate(read)[:, :-1].tolist()))
    assert found == sorted(map(tuple, batch["tokens"].tolist()))


def test_identity_is_what_the_batches_depend_on(data, corpus):
    assert json.loads(json.dumps(data.identity())) == data.identity()
    moved = Data(32, 8, data.sources, None, SMALL, 0.2, store="memory://", threads=0)
    assert moved.identity() == data.identity()
    others = [
        Data(33, 8, data.sources, None, SMALL, 0.2),
        Data(32, 4, data.sources, None, SMALL, 0.2),
        Data(32, 8, data.sources[:1], None, SMALL, 0.2),
        Data(32, 8, data.sources, (1.0, 2.0), SMALL, 0.2),
        Data(32, 8, data.sources, None, Bpe(301), 0.2),
        Data(32, 8, data.sources, None, SMALL, 0.1),
    ]
    assert all(other.identity() != data.identity() for other in others)
    assert corpus.identity().items() >= data.identity().items()


def test_identity_of_a_corpus_follows_the_text(data, corpus):
    assert data.prepare(quiet).identity() == corpus.identity()
    path = sorted(Path(data.sources[0].path).glob("*.txt"))
    for file in path[:10]:  # at least one is no held-out document
        file.write_text(file.read_text() + " changed")
    assert data.prepare(quiet).identity() != corpus.identity()


def test_all_of_a_source_can_be_held_out_for_evaluation(corpus, folder, tmp_path):
    corpus.tokenizer.save(tmp_path / "tokenizer.json")
    tokenizer = TokenizerFile(str(tmp_path / "tokenizer.json"))
    other = Data(32, 4, (Folder(str(folder("third", 20))),), tokenizer=tokenizer, held_out=1).prepare(quiet)
    assert other.describe()["held_out"]["third"]["documents"] == 20
    assert len(list(other.held_out())) > 1
    with pytest.raises(UserError, match="train split is empty"):
        other.train(0)


def test_two_sources_of_one_name_are_told_apart(folder, tmp_path):
    paths = [folder("x", 30), folder("y", 30)]
    for path in paths:
        (path / "same").mkdir()
        for file in path.glob("*.txt"):
            file.rename(path / "same" / file.name)
    corpus = Data(16, 2, tuple(Folder(str(path / "same")) for path in paths), tokenizer=SMALL, held_out=0).prepare(
        quiet
    )
    assert list(corpus.describe()["train"]) == ["same", "same#2"]
    with pytest.raises(UserError, match="held_out split is empty"):
        corpus.held_out()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seq": 0}, "Data.seq is 0; must be at least 1"),
        ({"seq": 2**31}, "Data.seq is 2147483648; must be in [1, 2**31)"),
        ({"batch": 0}, "Data.batch is 0; must be at least 1"),
        ({"threads": -1}, "Data.threads is -1; must be in [0, 256]"),
        ({"threads": 100000}, "Data.threads is 100000; must be in [0, 256]"),
        ({"held_out": 1.5}, "Data.held_out is 1.5; must be in [0, 1]"),
        ({"held_out": -0.1}, "Data.held_out is -0.1; must be in [0, 1]"),
        ({"held_out": 1}, "leaves no text to train a Bpe on"),
        ({"sources": ()}, "at least one source"),
        ({"sources": Synthetic()}, "expected a tuple"),
        ({"sources": (Synthetic,)}, "expected one such as Stdlib()"),
        ({"sources": ("stdlib",)}, "expected one such as Stdlib()"),
        ({"weights": (1.0, 2.0)}, "2 numbers for 1 sources"),
        ({"weights": (0.0,)}, "positive"),
        ({"weights": (float("nan"),)}, "positive"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, said):
    with pytest.raises(UserError) as caught:
        Data(**({"seq": 8, "batch": 2} | fields))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"seq": 4000},
            r"The held-out split has \d+ documents with [\d,]+ tokens, a sequence needs Data.seq \+ 1 = 4001",
        ),
        ({"held_out": 1e-9}, r"held-out split has 0 documents with 0 tokens.*raise Data.held_out \(now 1e-09\)"),
        ({"seq": 90000, "held_out": 0}, "The training split has [0-9,]+ tokens, a sequence needs"),
    ],
)
def test_a_split_smaller_than_a_sequence_is_refused_with_its_numbers(fields, said):
    source = Synthetic(documents=30, length=20)
    with pytest.raises(UserError, match=said):
        Data(**({"seq": 8, "batch": 2, "sources": (source,), "tokenizer": SMALL, "held_out": 0.2} | fields)).prepare(
            quiet
        )


def test_each_source_says_what_it_gives_to_each_split_and_what_is_left_over(folder):
    sources = (Folder(str(folder("first", 60))), Synthetic(documents=1, length=2))
    said: list[str] = []
    corpus = Data(32, 2, sources, tokenizer=SMALL, held_out=0.2).prepare(said.append)
    counts = {split: found["first"] for split, found in corpus.describe().items()}
    parts = []
    for split, found in counts.items():
        left = found["tokens"] - found["sequences"] * 32 - 1
        parts.append(
            f"{split.replace('_', ' ')}: {found['documents']} documents, {found['tokens']:,} tokens, "
            f"{found['sequences']} sequences" + (f", the last {left} tokens in none" if left else "")
        )
    assert f"first: {'; '.join(parts)}" in said
    (line,) = (line for line in said if line.startswith("synthetic: train:"))
    assert "fewer than Data.seq + 1 = 33 and so not used, 0 sequences" in line


def test_a_text_may_have_no_id_beyond_the_model(corpus):
    class Model:
        vocab = 300

    corpus.check_fits(Model, NextToken(), 32)
    Model.vocab = 299
    largest = max(int(max(batch["tokens"].max(), batch["targets"].max())) for batch in corpus.held_out())
    Model.vocab = max(found["largest"] for splits in corpus.describe().values() for found in splits.values()) + 1
    assert Model.vocab > largest
    corpus.check_fits(Model, NextToken(), 32)
    Model.vocab -= 1
    text = corpus.tokenizer.decode([Model.vocab])
    with pytest.raises(UserError) as caught:
        corpus.check_fits(Model, NextToken(), 32)
    assert f"has {Model.vocab} ({text!r}): set type.vocab to at least 300" in str(caught.value)


@pytest.mark.parametrize("held_out", [0.05, 0.5])
def test_one_file_trains_with_its_end_held_out(tmp_path, held_out):
    (tmp_path / "all.txt").write_text(" ".join(map(str, range(2000))))
    source = Folder(str(tmp_path / "all.txt"))
    corpus = Data(16, 2, (source,), tokenizer=SMALL, held_out=held_out).prepare(quiet)
    found = {split: counts["all.txt"] for split, counts in corpus.describe().items()}
    assert [counts["documents"] for counts in found.values()] == [1, 1]
    assert all(counts["sequences"] for counts in found.values())


def test_a_weighted_source_without_a_sequence_is_named():
    sources = (Synthetic(documents=30, length=20), Synthetic(documents=1, length=2))
    with pytest.raises(UserError, match="The source synthetic#2 has"):
        Data(64, 2, sources, (1.0, 1.0), SMALL, 0).prepare(quiet)
