"""Our arrays into theirs, and into safetensors files: one array after the other."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax

from axon.checkpoint.huggingface.pieces import Piece, Pieces
from axon.checkpoint.huggingface.weights import DTYPES, INDEX, SINGLE
from axon.disk import writing

SHARD = 5 * 10**9
"""Bytes of arrays in a file, at most, unless one array is larger."""

Fetch = Callable[[str, tuple[int, ...]], np.ndarray]
"""One of our arrays, by its path, at a place on each of its first dimensions; in the host's memory."""


class Theirs:
    """Arrays of theirs, made of ours when they are asked for."""

    def __init__(self, pieces: Pieces, fetch: Fetch):
        self.pieces, self._fetch = pieces, fetch
        self._parts: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for path, found in pieces.of.items():
            for piece in found:
                self._parts[piece.name].append((path, piece))

    def __call__(self, name: str) -> np.ndarray:
        """One of them, in the dtype of ours; 0 where none of ours is."""
        out: np.ndarray | None = None
        for path, piece in self._parts[name]:
            value = self._fetch(path, piece.at)
            value = value[tuple(slice(piece.form.sizes[axis]) for axis in piece.form.ours)]
            out = np.zeros(self.pieces.shapes[name], value.dtype) if out is None else out
            piece.form.write(out, value, piece.start, self.pieces.groups[name])
        assert out is not None, name
        return out


def fetch_from(arrays: Mapping[str, Any]) -> Fetch:
    """From arrays by path, of NumPy or JAX, sharded over devices of this process: copies only what is asked for."""

    def fetch(path: str, at: tuple[int, ...]) -> np.ndarray:
        array = arrays[path]
        return _host_part(array, at) if isinstance(array, jax.Array) else np.asarray(array)[at]

    return fetch


def _host_part(array: jax.Array, at: tuple[int, ...]) -> np.ndarray:
    out = np.empty(array.shape[len(at) :], array.dtype)
    for shard in array.addressable_shards:
        ranges = [one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True)]
        if shard.replica_id or not all(low <= place < high for place, (low, high) in zip(at, ranges, strict=False)):
            continue
        local = tuple(np.int32(place - low) for place, (low, _) in zip(at, ranges, strict=False))
        out[tuple(slice(*one) for one in ranges[len(at) :])] = np.asarray(_at(shard.data, local))
    return out


@jax.jit
def _at(x: jax.Array, places: tuple[jax.Array, ...]) -> jax.Array:
    for place in places:
        x = lax.dynamic_index_in_dim(x, place, keepdims=False)
    return x


@dataclass(frozen=True)
class Entry:
    """An array in a file: its name, dtype as `DTYPES` names it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(DTYPES[self.dtype]).itemsize


def write_weights(
    folder: Path, entries: Sequence[Entry], array: Callable[[str], np.ndarray], shard: int = SHARD
) -> list[str]:
    """Write safetensors into `folder`: one file, or several of at most `shard` bytes and an index; returns their names.

    `array`: by name, in a dtype that is cast to the entry's; it is asked for one at a time.
    """
    groups = list(_grouped(entries, shard))
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else [SINGLE]
    for name, group in zip(names, groups, strict=True):
        write_file(folder / name, group, array)
    if len(groups) > 1:
        files = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": files}
        with writing(folder / INDEX):
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return names


def write_file(
    path: Path,
    entries: Sequence[Entry],
    array: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """A safetensors file: the length of a header, the header in JSON, the arrays; in the order of the library's own."""
    order = list(DTYPES)
    entries = sorted(entries, key=lambda entry: (order.index(entry.dtype), entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = np.ascontiguousarray(array(entry.name)).astype(DTYPES[entry.dtype], copy=False)
            file.write(value.reshape(-1).view(np.uint8).data)


def _grouped(entries: Sequence[Entry], shard: int) -> Iterator[list[Entry]]:
    """Entries in their order, in groups of at most `shard` bytes."""
    group: list[Entry] = []
    for entry in entries:
        if group and sum(one.nbytes for one in group) + entry.nbytes > shard:
            yield group
            group = []
        group.append(entry)
    yield group
