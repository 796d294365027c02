"""Token arrays: what is appended is what every window reads, mapped or through TensorStore."""

import random

import numpy as np
import pytest

from axon.data.store import Root
from axon.data.tokens import MappedTokens, StoredTokens, TokenWriter, open_tokens
from axon.errors import UserError

SHARD, CHUNK = 1024, 64


def written(root: Root, tokens: np.ndarray) -> str:
    writer = TokenWriter(root, "tokens", tokens.dtype, SHARD, CHUNK)
    rest = tokens
    while len(rest):
        cut = random.randint(1, 2500)
        writer.append(rest[:cut])
        rest = rest[cut:]
    digest = writer.finish()
    assert writer.count == len(tokens)
    return digest


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
    written(root, tokens)
    reader = open_tokens(root, "tokens")
    assert isinstance(reader, MappedTokens)
    check_windows(reader, tokens)


@pytest.mark.parametrize("location", ["memory://", "file"])
def test_random_windows_read_back_through_tensorstore(tmp_path, tokens, location):
    root = Root(f"file://{tmp_path}" if location == "file" else location)
    written(root, tokens)
    check_windows(StoredTokens(root.array("tokens", open=True)), tokens)


def test_a_remote_store_is_read_through_tensorstore(tokens):
    root = Root("memory://bucket")
    written(root, tokens)
    assert isinstance(open_tokens(root, "tokens"), StoredTokens)


def test_the_digest_depends_on_the_tokens_and_not_on_how_they_were_appended(tmp_path, tokens):
    digests = {written(Root(str(tmp_path / name)), tokens) for name in "ab"}
    tokens[-1] ^= 1
    assert len(digests | {written(Root(str(tmp_path / "c")), tokens)}) == 2


def test_an_empty_array_has_no_tokens(tmp_path):
    root = Root(str(tmp_path))
    written(root, np.empty(0, np.uint16))
    assert open_tokens(root, "tokens").count == 0


@pytest.mark.parametrize("harm", ["index", "short", "gone"])
def test_a_damaged_shard_is_noticed_before_it_is_read(tmp_path, tokens, harm):
    root = Root(str(tmp_path))
    written(root, tokens)
    shard = tmp_path / "tokens" / "c" / "1"
    raw = shard.read_bytes()
    if harm == "gone":
        shard.unlink()
    else:
        shard.write_bytes(raw[:-100] + bytes(100) if harm == "index" else raw[: len(raw) // 3])
    with pytest.raises(UserError, match=f"{shard}"):
        open_tokens(root, "tokens")
