"""Token arrays: what is appended is what every window reads, from a folder and from an object store."""

import random

import numpy as np
import pytest

from axon.data.store import Root
from axon.data.tokens import TokenWriter, open_tokens
from axon.errors import UserError

SHARD, CHUNK = 1024, 64


VOCAB = 2**31


def written(root: Root, tokens: np.ndarray) -> dict:
    writer = TokenWriter(root, "tokens", tokens.dtype, SHARD, CHUNK)
    rest = tokens
    while len(rest):
        cut = random.randint(1, 2500)
        writer.append(rest[:cut])
        rest = rest[cut:]
    counts = writer.finish()
    assert counts["tokens"] == len(tokens)
    return counts


@pytest.fixture
def tokens(rng):
    kind = rng.choice([np.uint16, np.uint32])
    tokens = rng.integers(0, min(np.iinfo(kind).max, 2**31), random.randint(3000, 9000)).astype(kind)
    tokens[500:1500] = 0  # whole chunks of zeros, which zarr likes to leave out
    return tokens


def check_windows(reader, tokens: np.ndarray) -> None:
    assert reader.count == len(tokens)
    for length in (1, 65, 1000):
        starts = np.array(random.choices(range(len(tokens) - length), k=40))
        starts[:2] = 0, len(tokens) - length
        expected = np.stack([tokens[start : start + length] for start in starts])
        found = reader.read(starts, length)
        assert found.dtype == np.int32
        assert np.array_equal(found, expected.astype(np.int32))


@pytest.fixture(params=["folder", "memory://bucket"])
def root(request, tmp_path):
    return Root(str(tmp_path) if request.param == "folder" else request.param)


def test_random_windows_read_back(root, tokens):
    check_windows(open_tokens(root, "tokens", written(root, tokens), VOCAB), tokens)


def test_the_digest_depends_on_the_tokens_and_not_on_how_they_were_appended(tmp_path, tokens):
    first, again = (written(Root(str(tmp_path / name)), tokens) for name in "ab")
    assert first == again
    tokens[-1] ^= 1
    assert written(Root(str(tmp_path / "c")), tokens)["digest"] != first["digest"]


def test_an_empty_array_has_no_tokens(root):
    assert open_tokens(root, "tokens", written(root, np.empty(0, np.uint16)), VOCAB).count == 0


HARMS = {
    "index": lambda raw: raw[:-100] + bytes(100),
    "short": lambda raw: raw[: len(raw) // 3],
    "empty": lambda raw: b"",
    "flipped": lambda raw: raw[:1000] + bytes(byte ^ 255 for byte in raw[1000:1100]) + raw[1100:],
    "one bit": lambda raw: raw[:1500] + bytes([raw[1500] ^ 4]) + raw[1501:],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_shard_is_noticed_when_it_is_read_and_the_others_are_read(root, tokens, harm):
    counts = written(root, tokens)
    reader = open_tokens(root, "tokens", counts, VOCAB)
    raw = root._keys.read("tokens/c/1").result().value
    root._keys.write("tokens/c/1", HARMS[harm](raw)).result()
    assert np.array_equal(reader.read(np.array([0]), SHARD)[0], tokens[:SHARD].astype(np.int32))
    with pytest.raises(UserError, match=rf"{root.location}/tokens cannot be read: .*delete that folder"):
        reader.read(np.arange(SHARD, 2 * SHARD, CHUNK), CHUNK)
    if root.local:
        with pytest.raises(UserError, match=r"delete that folder"):
            open_tokens(root, "tokens", counts, VOCAB)


def test_a_store_with_a_shard_or_its_description_gone_is_damaged(root, tokens):
    counts = written(root, tokens)
    for part in ("c/1", "zarr.json"):
        root._keys.write(f"tokens/{part}", None).result()
        with pytest.raises(UserError, match=rf"{root.location}/tokens cannot be read: .*delete that folder"):
            open_tokens(root, "tokens", counts, VOCAB).read(np.array([SHARD]), 1)


def test_ids_beyond_the_vocabulary_are_refused(root, tokens):
    counts, most = written(root, tokens), int(tokens.max())
    check_windows(open_tokens(root, "tokens", counts, vocab=most + 1), tokens)
    with pytest.raises(UserError, match=f"holds the id {most}, and the tokenizer has {most} ids"):
        open_tokens(root, "tokens", counts, vocab=most).read(np.array([int(tokens.argmax())]), 1)


def test_a_manifest_of_other_tokens_is_refused(root, tokens):
    counts = written(root, tokens)
    with pytest.raises(UserError, match=r"tokens, and its manifest says 3"):
        open_tokens(root, "tokens", counts | {"tokens": 3}, VOCAB)
