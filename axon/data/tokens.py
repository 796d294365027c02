"""Token arrays: uncompressed sharded zarr3, read through TensorStore anywhere and memory-mapped on a local disk.

Without compression a shard's file is its tokens, chunk after chunk, and then an index. So one format serves both: any
zarr3 reader opens it, and a local shard is mapped as the flat array that it is.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import tensorstore as ts

from axon.data.store import Root
from axon.errors import UserError

SHARD = 16 * 2**20
CHUNK = 64 * 2**10
MISSING = 2**64 - 1


class TokenWriter:
    """Appends tokens to a new array at `key`, holding at most one shard in memory."""

    def __init__(self, root: Root, key: str, dtype: np.dtype, shard: int = SHARD, chunk: int = CHUNK):
        self._root = root
        self._array = root.array(key, spec=_spec(dtype, shard, chunk), create=True)
        self._waiting = np.empty(shard, dtype)
        self._filled = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.count = 0

    def append(self, tokens: np.ndarray) -> None:
        """Adds `tokens`, of any length, at the end."""
        while len(tokens):
            taken = tokens[: len(self._waiting) - self._filled]
            self._waiting[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken) :]
            if self._filled == len(self._waiting):
                self._flush()

    def finish(self) -> str:
        """Writes what is left; returns a digest of all tokens."""
        if self._filled:
            self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        shard = self._waiting[: self._filled]
        end = self.count + self._filled
        self._array = self._root.ask(self._array.resize(exclusive_max=[end]).result)
        self._root.ask(self._array[self.count : end].write(shard).result)
        self._hash.update(shard.tobytes())
        self.count, self._filled = end, 0


def _spec(dtype: np.dtype, shard: int, chunk: int) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [chunk],
        "codecs": [little],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    # A chunk of zeros must be there too, or the shard's file would not be the flat array.
    return {"metadata": metadata, "store_data_equal_to_fill_value": True}


class Tokens(Protocol):
    """A long array of tokens that is read in windows."""

    count: int

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        ...


class StoredTokens:
    """Windows read through TensorStore, all at once: for remote stores."""

    def __init__(self, array: ts.TensorStore):
        self._array = array
        self.count: int = array.shape[0]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        waiting = [self._array[start : start + length].read() for start in starts.tolist()]
        return np.array([future.result() for future in waiting], np.int32).reshape(len(starts), length)


class MappedTokens:
    """Windows, of at most a shard's length, copied from the memory-mapped shards of a local store."""

    def __init__(self, folder: Path, array: ts.TensorStore):
        self.count: int = array.shape[0]
        self._shard, chunk = _grid(array)
        dtype = array.dtype.numpy_dtype
        self._shards = [
            _mapped_shard(folder / "c" / str(number), dtype, chunk, self._shard // chunk, self.count - start)
            for number, start in enumerate(range(0, self.count, self._shard))
        ]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        windows = np.empty((len(starts), length), np.int32)
        for window, start in zip(windows, starts.tolist(), strict=True):
            number, offset = divmod(start, self._shard)
            head = self._shards[number][offset : offset + length]
            window[: len(head)] = head
            if len(head) < length:
                window[len(head) :] = self._shards[number + 1][: length - len(head)]
        return windows


def _grid(array: ts.TensorStore) -> tuple[int, int]:
    """Tokens in a shard, and in a chunk."""
    metadata = array.spec().to_json()["metadata"]
    sharding = metadata["codecs"][0]
    return metadata["chunk_grid"]["configuration"]["chunk_shape"][0], sharding["configuration"]["chunk_shape"][0]


def _mapped_shard(path: Path, dtype: np.dtype, chunk: int, chunks: int, left: int) -> np.ndarray:
    """The shard's tokens as a flat array, once its index says that they lie in the file in order."""
    used = min(chunks, -(-left // chunk))
    size = chunk * dtype.itemsize
    expected = np.full((chunks, 2), MISSING, "<u8")
    expected[:used] = np.arange(used)[:, None] * [size, 0] + [0, size]
    try:
        index = np.fromfile(path, "<u8", count=2 * chunks, offset=used * size).reshape(-1, 2)
        flat = np.memmap(path, dtype.newbyteorder("<"), "r", shape=(used * chunk,))
    except (OSError, ValueError) as error:
        raise UserError(f"The token shard {path} cannot be read ({error}): delete its folder and run again.") from None
    if not np.array_equal(index, expected):
        raise UserError(f"The token shard {path} is damaged: its index is not the one written. Delete its folder.")
    return np.asarray(flat)  # slicing a memmap object itself is three times slower


def open_tokens(root: Root, key: str) -> Tokens:
    """The tokens at `key`: mapped where the root is a local folder, else through TensorStore."""
    array = root.array(key, open=True, read=True)
    return MappedTokens(root.local / key, array) if root.local else StoredTokens(array)
