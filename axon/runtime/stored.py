"""Arrays in files, read and written by parts: TensorStore behind one module."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import add
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding

from axon.disk import FREE_SPACE, is_full
from axon.errors import UserError
from axon.runtime.scratch import Scratch

BLOCK = 64 * 2**20
"""Bytes that are in the host's memory at once when an array in files is saved, at most."""
Shard = tuple[tuple[int, int], ...]
"""Where a shard begins and ends, by dimension."""


class Files:
    """The open files of the arrays in a `Scratch`, and what is still being written to them."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self._open: dict[str, Any] = {}
        self._writes: dict[tuple[str, int], list[Any]] = {}

    def store(self, array: "StoredArray") -> Any:
        """The TensorStore of an array, created if it is not there: one file for each shard of each part."""
        import tensorstore

        if array.name not in self._open:
            with self.explained():
                self._open[array.name] = tensorstore.open(
                    {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.scratch.path / array.name)}},
                    create=True,
                    open=True,
                    dtype=tensorstore.dtype(array.dtype.name),
                    shape=array.stored_shape,
                    chunk_layout=tensorstore.ChunkLayout(chunk_shape=(1, *array.part_sharding.shard_shape(array.part))),
                    context=self.scratch.context,
                ).result()
        return self._open[array.name]

    def begin(self, array: "StoredArray", number: int, shards: Mapping[Shard, np.ndarray]) -> None:
        """Start to write a part."""
        self.wait(array, number)
        store = self.store(array)[number]
        self._writes[array.name, number] = [store[_slices(shard)].write(value) for shard, value in shards.items()]

    def wait(self, array: "StoredArray", number: int) -> None:
        """Return when a part is written. Raises `UserError` if it could not be."""
        with self.explained():
            for write in self._writes.pop((array.name, number), ()):
                write.result()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn TensorStore's `ValueError`, whatever fails, a full disk among it, into `UserError`."""
        try:
            yield
        except (ValueError, OSError) as error:
            free = f"{FREE_SPACE}, which" if is_full(error) else "The same command"
            raise UserError(
                f"{self.scratch.where}: files in {self.scratch.path} cannot be read or written: {str(error)[:300]}\n"
                f"{free} continues from the last checkpoint"
            ) from error


@jax.tree_util.register_static
@dataclass(frozen=True)
class StoredArray:
    """An array in files, in a place of a state where another layout has a `jax.Array`.

    To compiled functions it is part of their arguments' structure, not an argument. Like an array that is donated,
    what it was before an update is gone after it.

    Args:
        name: of the file. shape, dtype: of the array. part_sharding: of a part, which is what is read or written at
            once. stacked: whether a part is one element along the first dimension, as a layer is; else it is all.
    """

    files: Files = field(repr=False)
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    part_sharding: Sharding = field(repr=False)
    stacked: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a part."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape with the parts along the first dimension."""
        return self.shape if self.stacked else (1, *self.shape)

    def read(self, number: int = 0) -> Callable[[], Array]:
        """Start to read a part. What is returned waits for it, and gives the array."""
        self.wait(number)
        with self.files.explained():
            store = self.files.store(self)[number]
            places = self.part_sharding.addressable_devices_indices_map(self.part)
            shards = dict.fromkeys(_shard(index, self.part) for index in places.values())
            return partial(self._placed, {shard: store[_slices(shard)].read() for shard in shards})

    def _placed(self, reads: Mapping[Shard, Any]) -> Array:
        with self.files.explained():
            found = {shard: read.result() for shard, read in reads.items()}
        return jax.make_array_from_callback(
            self.part, self.part_sharding, lambda index: found[_shard(index, self.part)]
        )

    def write(self, value: Array, number: int = 0) -> None:
        """Start to write a part, once it is computed."""
        shards = {_shard(shard.index, self.part): shard for shard in value.addressable_shards}
        self.files.begin(self, number, {where: np.asarray(shard.data) for where, shard in shards.items()})

    def wait(self, number: int | None = None) -> None:
        """Return when a part is written; None: all parts."""
        for one in range(self.stored_shape[0]) if number is None else (number,):
            self.files.wait(self, one)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of a block that `blocks` reads, at most `BLOCK` bytes; at the ends of dimensions it may be less."""
        for axis, size in enumerate(self.shape):
            nbytes = math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize
            if nbytes <= BLOCK:
                count = min(size, BLOCK // max(1, nbytes))
                return (*(1,) * axis, max(1, count), *self.shape[axis + 1 :])
        return (1,) * self.ndim

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """All of it, in the host's memory one block after the other: where it is, and its values."""
        starts = (range(0, size, step) for size, step in zip(self.shape, self.grid, strict=True))
        for corner in product(*starts):
            ends = map(min, map(add, corner, self.grid), self.shape)
            where = tuple(map(slice, corner, ends))
            yield where, self.block(where)

    def block(self, where: tuple[slice, ...]) -> np.ndarray:
        """A part of it by ranges of all dimensions, in the host's memory."""
        self.wait()
        with self.files.explained():
            store = self.files.store(self)
            return (store if self.stacked else store[0])[where].read().result()

    def fill(self, value: np.ndarray) -> "StoredArray":
        """Itself, with these values."""
        self.wait()
        with self.files.explained():
            self.files.store(self).write(value.reshape(self.stored_shape)).result()
        return self


def is_stored(leaf: Any) -> bool:
    """Whether `leaf` is an array in files: `is_leaf` of functions of trees, to which it is a node without leaves."""
    return isinstance(leaf, StoredArray)


def _shard(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Shard:
    return tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))


def _slices(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in shard)
