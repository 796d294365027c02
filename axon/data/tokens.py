"""Token arrays: uncompressed sharded zarr3, read through TensorStore anywhere and memory-mapped on a local disk.

Without compression a shard's file is its tokens, chunk after chunk, and then an index. So one format serves both: any
zarr3 reader opens it, and a local shard is memory-mapped as a flat array. Damage is detected by checksums: of a local
shard's whole file in the manifest, of a remote chunk in the shard itself, where TensorStore verifies it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts
from isal.isal_zlib import crc32

from axon.data.store import Root
from axon.disk import reading

SHARD = 16 * 2**20
CHUNK = 64 * 2**10
MISSING = 2**64 - 1
CHECKED_AT_ONCE = 2 * 2**30
"""Bytes of a split up to which its checksums are compared when it is opened; above, when a shard is first read."""


Guard = Callable[[], AbstractContextManager[None]]
"""See `Root.intact`."""


class TokenWriter:
    """Appends tokens to a new array at `key`, holding at most one shard in memory."""

    def __init__(self, root: Root, key: str, dtype: np.dtype, shard: int = SHARD, chunk: int = CHUNK):
        self._root, self._key = root, key
        spec = _spec(dtype, shard, chunk, checksums=root.local is None)
        self._array = root.ask(lambda: root.array(key, spec=spec, create=True))
        self._waiting = np.empty(shard, dtype)
        self._filled = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.count, self._largest = 0, -1
        self._crc32: list[int] = []

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
        """Writes what is left; returns what `open_tokens` needs: the count, a digest of all tokens, checksums of files.

        `largest`: of the ids; -1 if there are none. `crc32`: of each shard, empty on a remote root; `metadata_crc32`:
        of the array's description.
        """
        if self._filled:
            self._flush()
        metadata = self._root.crc32(f"{self._key}/zarr.json")
        digest = self._hash.hexdigest()
        counts = {"tokens": self.count, "largest": self._largest, "digest": digest}
        return counts | {"crc32": self._crc32, "metadata_crc32": metadata}

    def _flush(self) -> None:
        shard = self._waiting[: self._filled]
        end = self.count + self._filled
        self._array = self._root.ask(self._array.resize(exclusive_max=[end]).result)
        self._root.ask(self._array[self.count : end].write(shard).result)
        raw = shard.astype(shard.dtype.newbyteorder("<")).tobytes()
        self._hash.update(raw)
        self._largest = max(self._largest, int(shard.max()))
        if self._root.local:
            self._crc32.append(crc32(self._after(len(raw)), crc32(raw)))
        self.count, self._filled = end, 0

    def _after(self, tokens: int) -> bytes:
        """What TensorStore has written of the last shard after so many bytes of tokens: padding and an index."""
        assert self._root.local is not None
        with reading(path := _shard_path(self._root.local / self._key, len(self._crc32))), path.open("rb") as file:
            file.seek(tokens)
            return file.read()


def _shard_path(folder: Path, number: int) -> Path:
    return folder / "c" / str(number)


def _spec(dtype: np.dtype, shard: int, chunk: int, checksums: bool) -> dict:
    little, checked = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    sharding = {
        "chunk_shape": [chunk],
        "codecs": [little, checked] if checksums else [little],
        "index_codecs": [little, checked],
        "index_location": "end",
    }
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    # zarr leaves out chunks of zeros; without them the shard's file would not be a flat array.
    return {"metadata": metadata, "store_data_equal_to_fill_value": True}


class Tokens(Protocol):
    """A long array of tokens that is read in windows."""

    count: int

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        ...


class StoredTokens:
    """Windows read through TensorStore, concurrently: for remote stores. TensorStore verifies each chunk's checksum."""

    def __init__(self, array: ts.TensorStore, vocab: int, intact: Guard):
        self._array, self._vocab, self._intact = array, vocab, intact
        self.count: int = array.shape[0]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        with self._intact():
            waiting = [self._array[start : start + length].read() for start in starts.tolist()]
            windows = np.array([future.result() for future in waiting]).reshape(len(starts), length)
            _check_ids(windows, self._vocab, "the array")
        return windows.astype(np.int32)


class MappedTokens:
    """Windows, of at most a shard's length, copied from the memory-mapped shards of a local store.

    A shard's checksum is verified once: of all shards now, or in a large store of each when it is first read.
    """

    def __init__(self, folder: Path, array: ts.TensorStore, crc32: Sequence[int], vocab: int, intact: Guard):
        self._folder, self._crc32, self._vocab, self._intact = folder, crc32, vocab, intact
        self.count: int = array.shape[0]
        self._shard, chunk = _grid(array)
        dtype = array.dtype.numpy_dtype
        self._shards = [
            _mapped_shard(self._path(number), dtype, chunk, self._shard // chunk, self.count - start)
            for number, start in enumerate(range(0, self.count, self._shard))
        ]
        self._unchecked = set(range(len(self._shards)))
        if self.count * dtype.itemsize <= CHECKED_AT_ONCE:
            for number in range(len(self._shards)):
                self._whole(number)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 `window length`: the tokens from each of `starts` on."""
        windows = np.empty((len(starts), length), np.int32)
        for window, start in zip(windows, starts.tolist(), strict=True):
            number, offset = divmod(start, self._shard)
            head = self._whole(number)[offset : offset + length]
            window[: len(head)] = head
            if len(head) < length:
                window[len(head) :] = self._whole(number + 1)[: length - len(head)]
        return windows

    def _whole(self, number: int) -> np.ndarray:
        """A shard, its checksum verified."""
        if number in self._unchecked:
            with self._intact():
                self._check(number)
            self._unchecked.discard(number)
        return self._shards[number]

    def _check(self, number: int) -> None:
        path, tokens = self._path(number), self._shards[number][: self.count - number * self._shard]
        if crc32(np.memmap(path, np.uint8, "r")) != self._crc32[number]:
            raise ValueError(f"the token shard {path} has a checksum other than when it was written")
        _check_ids(tokens, self._vocab, f"the token shard {path}")

    def _path(self, number: int) -> Path:
        return _shard_path(self._folder, number)


def _check_ids(tokens: np.ndarray, vocab: int, where: str) -> None:
    if tokens.size and tokens.max() >= vocab:
        raise ValueError(f"{where} holds the id {tokens.max()}, and the tokenizer has {vocab} ids")


def _grid(array: ts.TensorStore) -> tuple[int, int]:
    """Tokens in a shard, and in a chunk."""
    metadata = array.spec().to_json()["metadata"]
    sharding = metadata["codecs"][0]
    return metadata["chunk_grid"]["configuration"]["chunk_shape"][0], sharding["configuration"]["chunk_shape"][0]


def _mapped_shard(path: Path, dtype: np.dtype, chunk: int, chunks: int, left: int) -> np.ndarray:
    """The shard's tokens as a flat array. Raises `ValueError` unless its index has all chunks in order."""
    used = min(chunks, -(-left // chunk))
    size = chunk * dtype.itemsize
    expected = np.full((chunks, 2), MISSING, "<u8")
    expected[:used] = np.arange(used)[:, None] * [size, 0] + [0, size]
    index = np.fromfile(path, "<u8", count=2 * chunks, offset=used * size)
    if not np.array_equal(index, expected.ravel()):
        raise ValueError(f"the token shard {path} has an index other than when it was written")
    flat = np.memmap(path, dtype.newbyteorder("<"), "r", shape=(used * chunk,))
    return np.asarray(flat)  # slicing a memmap object itself is three times slower


def open_tokens(root: Root, key: str, counts: Mapping[str, Any], vocab: int) -> Tokens:
    """The tokens at `key`: mapped where the root is a local folder, else through TensorStore.

    `counts`: their entry in the manifest; `vocab` is above every id.

    Raises:
        UserError: they are damaged, as far as was read; it names the folder to delete.
    """
    intact = partial(root.intact, key.rsplit("/", 2)[0])  # above the part and the split
    with intact():
        if root.crc32(f"{key}/zarr.json") != counts["metadata_crc32"]:
            raise ValueError(f"{key}/zarr.json has a checksum other than when it was written")
        array = root.array(key, open=True, read=True)
        if array.shape[0] != counts["tokens"]:
            raise ValueError(f"{key} has {array.shape[0]:,} tokens, and its manifest says {counts['tokens']:,}")
        if root.local is None:
            return StoredTokens(array, vocab, intact)
        return MappedTokens(root.local / key, array, counts["crc32"], vocab, intact)
