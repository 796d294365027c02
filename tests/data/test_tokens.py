"""Token arrays: what is appended is what every window reads, mapped or through TensorStore."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from axon.data import tokens as module
from axon.data.store import Root
from axon.data.tokens import MappedTokens, StoredTokens, TokenWriter, open_tokens
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
def tokens():
    generator = np.random.default_rng()
    kind = generator.choice([np.uint16, np.uint32])
    tokens = generator.integers(0, min(np.iinfo(kind).max, 2**31), random.randint(3000, 9000)).astype(kind)
    tokens[500:1500] = 0  # whole chunks of zeros, which zarr likes to leave out
    return tokens


def check_windows(reader, tokens: np.ndarray) -> None:
    assert reader.count == len(tokens)
    for length in (1, 65, 1000):
        starts = np.random.default_rng().integers(0, len(tokens) - length, 40)
        starts[:2] = 0, len(tokens) - length
        expected = np.stack([tokens[start : start + length] for start in starts])
        found = reader.read(starts, length)
        assert found.dtype == np.int32
        assert np.array_equal(found, expected.astype(np.int32))


def test_random_windows_read_back_mapped(tmp_path, tokens):
    root = Root(str(tmp_path))
    reader = open_tokens(root, "tokens", written(root, tokens), VOCAB)
    assert isinstance(reader, MappedTokens)
    check_windows(reader, tokens)


@pytest.mark.parametrize("location", ["memory://", "file"])
def test_random_windows_read_back_through_tensorstore(tmp_path, tokens, location):
    root = Root(f"file://{tmp_path}" if location == "file" else location)
    written(root, tokens)
    check_windows(StoredTokens(root.array("tokens", open=True), VOCAB, nullcontext), tokens)


def test_a_remote_store_is_read_through_tensorstore(tokens):
    root = Root("memory://bucket")
    assert isinstance(open_tokens(root, "tokens", written(root, tokens), VOCAB), StoredTokens)


def test_the_digest_depends_on_the_tokens_and_not_on_how_they_were_appended(tmp_path, tokens):
    first, again = (written(Root(str(tmp_path / name)), tokens) for name in "ab")
    assert first == again
    tokens[-1] ^= 1
    assert written(Root(str(tmp_path / "c")), tokens)["digest"] != first["digest"]


def test_an_empty_array_has_no_tokens(tmp_path):
    root = Root(str(tmp_path))
    assert open_tokens(root, "tokens", written(root, np.empty(0, np.uint16)), VOCAB).count == 0


HARMS = {
    "index": lambda raw: raw[:-100] + bytes(100),
    "short": lambda raw: raw[: len(raw) // 3],
    "empty": lambda raw: b"",
    "flipped": lambda raw: raw[:1000] + bytes(byte ^ 255 for byte in raw[1000:1100]) + raw[1100:],
    "one bit": lambda raw: raw[:1500] + bytes([raw[1500] ^ 4]) + raw[1501:],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_shard_is_noticed_before_it_is_read(tmp_path, tokens, harm):
    root = Root(str(tmp_path))
    counts = written(root, tokens)
    shard = tmp_path / "tokens" / "c" / "1"
    shard.write_bytes(HARMS[harm](shard.read_bytes()))
    with pytest.raises(UserError, match=rf"{tmp_path}/tokens cannot be read: .*delete that folder"):
        open_tokens(root, "tokens", counts, VOCAB)


def test_a_store_with_a_shard_or_its_description_gone_is_damaged(tmp_path, tokens):
    root = Root(str(tmp_path))
    counts = written(root, tokens)
    for part in ("c/1", "zarr.json"):
        (tmp_path / "tokens" / part).unlink()
        with pytest.raises(UserError, match=rf"{tmp_path}/tokens cannot be read: .*delete that folder"):
            open_tokens(root, "tokens", counts, VOCAB)


def test_a_large_store_is_compared_shard_by_shard_as_it_is_read(tmp_path, tokens, monkeypatch):
    monkeypatch.setattr(module, "CHECKED_AT_ONCE", 0)
    root = Root(str(tmp_path))
    counts = written(root, tokens)
    shard = tmp_path / "tokens" / "c" / "1"
    shard.write_bytes(HARMS["one bit"](shard.read_bytes()))
    reader = open_tokens(root, "tokens", counts, VOCAB)
    assert np.array_equal(reader.read(np.array([0]), SHARD)[0], tokens[:SHARD].astype(np.int32))
    with pytest.raises(UserError, match=rf"{shard} has a checksum other than when it was written.*delete that folder"):
        reader.read(np.array([SHARD - 1]), 2)


@pytest.mark.parametrize("location", ["memory://bucket", "folder"])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path, tokens, location):
    root = Root(str(tmp_path) if location == "folder" else location)
    counts, most = written(root, tokens), int(tokens.max())
    check_windows(open_tokens(root, "tokens", counts, vocab=most + 1), tokens)
    with pytest.raises(UserError, match=f"holds the id {most}, and the tokenizer has {most} ids"):
        open_tokens(root, "tokens", counts, vocab=most).read(np.array([int(tokens.argmax())]), 1)


def test_a_remote_chunk_that_was_flipped_is_noticed_when_it_is_read(tokens):
    root = Root("memory://bucket")
    reader = open_tokens(root, "tokens", written(root, tokens), VOCAB)
    raw = root._keys.read("tokens/c/0").result().value
    root._keys.write("tokens/c/0", HARMS["one bit"](raw)).result()
    with pytest.raises(UserError, match=r"memory://bucket/tokens cannot be read: DATA_LOSS: .*Digest mismatch"):
        reader.read(np.arange(0, SHARD, CHUNK), CHUNK)


def test_a_manifest_of_other_tokens_is_refused(tmp_path, tokens):
    root = Root(str(tmp_path))
    counts = written(root, tokens)
    with pytest.raises(UserError, match=r"tokens, and its manifest says 3"):
        open_tokens(root, "tokens", counts | {"tokens": 3}, VOCAB)
