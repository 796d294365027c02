"""Token arrays: uncompressed sharded zarr3, each chunk with a checksum, which TensorStore verifies as it reads it."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts

from axon.data.store import Root

SHARD = 16 * 2**20
CHUNK = 64 * 2**10
CHECKED_AT_ONCE = 2 * 2**30
"""Bytes of a split in a folder up to which all of it is read when it is opened: damage is found before a run begins."""

Guard = Callable[[], AbstractContextManager[None]]
"""See `Root.intact`."""


class TokenWriter:
    """Appends tokens to a new array at `key`, holding at most one shard in memory."""

    def __init__(self, root: Root, key: str, dtype: np.dtype, shard: int = SHARD, chunk: int = CHUNK):
        self._root, self._key = root, key
        self._array = root.ask(lambda: root.array(key, spec=_spec(dtype, shard, chunk), create=True))
        self._waiting = np.empty(shard, dtype)
        self._filled = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.count, self._largest = 0, -1

    def append(self, tokens: np.ndarray) -> None:
        """Adds `tokens`, of any length, at the end."""
        while len(tokens):
            taken = tokens[: len(self._waiting) - self._filled]
            self._waiting[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken) :]
            if self._filled == len(self._waiting):
                self._flush()

    def finish(self) -> dict[str, Any]:
        """Writes what is left; returns what `open_tokens` needs: the count, and a digest of all tokens.

        `largest`: of the ids; -1 if there are none. `metadata_crc32`: of the array's description.
        """
        if self._filled:
            self._flush()
        metadata = self._root.crc32(f"{self._key}/zarr.json")
        digest = self._hash.hexdigest()
        return {"tokens": self.count, "largest": self._largest, "digest": digest, "metadata_crc32": metadata}

    def _flush(self) -> None:
        shard = self._waiting[: self._filled]
        end = self.count + self._filled
        self._array = self._root.ask(self._array.resize(exclusive_max=[end]).result)
        self._root.ask(self._array[self.count : end].write(shard).result)
        self._hash.update(shard.astype(shard.dtype.newbyteorder("<")).tobytes())
        self._largest = max(self._largest, int(shard.max()))
        self.count, self._filled = end, 0


def _spec(dtype: np.dtype, shard: int, chunk: int) -> dict:
    little, checked = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    sharding = {
        "chunk_shape": [chunk],
        "codecs": [little, checked],
        "index_codecs": [little, checked],
        "index_location": "end",
    }
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    # zarr leaves out chunks of zeros, and a chunk that is gone would be taken for one.
    return {"metadata": metadata, "store_data_equal_to_fill_value": True}


class Tokens:
    """A long array of tokens that is read in windows, concurrently; a chunk's checksum is verified as it is read."""

    def __init__(self, array: ts.TensorStore, vocab: int, intact: Guard):
        self._array, self._vocab, self._intact = array, vocab, intact
        self.count: int = array.shape[0]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        with self._intact():
            waiting = [self._array[start : start + length].read() for start in starts.tolist()]
            windows = np.array([future.result() for future in waiting]).reshape(len(starts), length)
            if windows.size and windows.max() >= self._vocab:
                raise ValueError(f"the array holds the id {windows.max()}, and the tokenizer has {self._vocab} ids")
        return windows.astype(np.int32)


def open_tokens(root: Root, key: str, counts: Mapping[str, Any], vocab: int) -> Tokens:
    """The tokens at `key`, to be read through TensorStore.

    `counts`: their entry in the manifest; `vocab` is above every id.

    Raises:
        UserError: they are damaged, as far as was read; it names the folder to delete.
    """
    intact = partial(root.intact, key.rsplit("/", 2)[0])  # above the part and the split
    with intact():
        if root.crc32(f"{key}/zarr.json") != counts["metadata_crc32"]:
            raise ValueError(f"{key}/zarr.json has a checksum other than when it was written")
        array = root.array(key, spec={"fill_missing_data_reads": False}, open=True, read=True)
        if array.shape[0] != counts["tokens"]:
            raise ValueError(f"{key} has {array.shape[0]:,} tokens, and its manifest says {counts['tokens']:,}")
        tokens = Tokens(array, vocab, intact)
        if root.local is not None and tokens.count * array.dtype.numpy_dtype.itemsize <= CHECKED_AT_ONCE:
            for start in range(0, tokens.count, SHARD):
                tokens.read(np.array([start]), min(SHARD, tokens.count - start))
        return tokens
