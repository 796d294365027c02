"""Arrays of the hub into ours: each shard is read on its own, from the parts of files that it is made of."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.form import Range
from axon.checkpoint.huggingface.pieces import SHOWN, Piece, Pieces, differences

CHUNK = 16 * 2**20
"""Bytes that a thread reads at once, at most; one place along the first dimension of an array of theirs may be more."""
THREADS = min(4, os.cpu_count() or 1)
_BLOCK = 2**16
"""Elements that are transposed at once: in a processor's cache, where whole matrices take several times as long."""
_SIDE = 256
"""Of a block of them, along the two dimensions that lie in one piece there and here."""


class Source(Protocol):
    """What `Weights` has; `read` is called in several threads."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray: ...
    def item_size(self, name: str) -> int: ...


def check_weights(source: Source, pieces: Pieces, unused: Sequence[str], where: str, model: str) -> None:
    """Raise one `CheckpointError` that lists each array that is missing, unexpected or of another shape, or one for an
    array of a dtype that cannot be read: before anything is read or written."""
    if not (lines := differences(pieces, source.shapes, unused)):
        for name in pieces.shapes:
            source.item_size(name)
        return
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise CheckpointError("\n  ".join([f"the weights in {where} are not those of {model}:", *lines[:SHOWN], *more]))


def as_read(path: str, value: Any) -> Any:
    """`value`, whatever its path."""
    return value


def load(
    source: Source,
    pieces: Pieces,
    abstract: Mapping[str, Any],
    *,
    chunk: int = CHUNK,
    put: Callable = jax.device_put,
    each: Callable[[str, Any], Any] = as_read,
) -> dict[str, Any]:
    """Path → array of `abstract`, path → `jax.ShapeDtypeStruct` with a sharding; or what `each(path, array)` makes of
    it, as soon as it is there.

    Host memory: one shard, and in each of `THREADS` threads `chunk` bytes of theirs. What they have not, as identity
    layers and ids of a padded vocabulary, is 0.
    """
    return {path: each(path, _array(source, pieces, path, leaf, chunk, put)) for path, leaf in abstract.items()}


def _array(source: Source, pieces: Pieces, path: str, leaf: Any, chunk: int, put: Callable) -> jax.Array:
    sharding = leaf.sharding
    places: dict[tuple[Range, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        ranges = tuple(one.indices(size)[:2] for one, size in zip(index or (), leaf.shape, strict=True))
        places.setdefault(ranges, []).append(device)
    shards = []
    for ranges, devices in places.items():
        value = read_shard(source, pieces, path, ranges, leaf.dtype, chunk)
        for device in devices:
            shards.append(put(value, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
        jax.block_until_ready(shards)
        del value
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def read_shard(
    source: Source, pieces: Pieces, path: str, ranges: tuple[Range, ...], dtype: Any, chunk: int = CHUNK
) -> np.ndarray:
    """The part of one of our arrays in `ranges`, one for each dimension."""
    out = np.zeros([high - low for low, high in ranges], dtype)
    work = []
    for piece in pieces.of[path]:
        if not all(low <= place < high for place, (low, high) in zip(piece.at, ranges, strict=False)):
            continue
        target = out[tuple(place - low for place, (low, _) in zip(piece.at, ranges, strict=False))]
        work += _parts(source, pieces, piece, target, ranges[len(piece.at) :], chunk)
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(lambda part: part(), work):
            pass
    return out


def _parts(
    source: Source, pieces: Pieces, piece: Piece, target: np.ndarray, ranges: tuple[Range, ...], chunk: int
) -> Iterator[Callable[[], None]]:
    """Functions of which each reads a chunk of one array of theirs into the part of a shard that it is."""
    form, total = piece.form, pieces.groups[piece.name]
    names = form.ours
    clipped = {name: (low, min(high, form.sizes[name])) for name, (low, high) in zip(names, ranges, strict=True)}
    if any(high <= low for low, high in clipped.values()):
        return
    per_place = source.item_size(piece.name) * form.elements(clipped, piece.start, total)
    for part in _split(clipped, form.outermost, per_place, chunk):
        where = tuple(
            slice(part[name][0] - low, part[name][1] - low) for name, (low, _) in zip(names, ranges, strict=True)
        )

        def fill(part: dict[str, Range] = part, where: tuple[slice, ...] = where) -> None:
            value = form.read(lambda found: source.read(piece.name, found), part, piece.start, total)
            assign(target[(*where, ...)], value)

        yield fill


def assign(target: np.ndarray, value: np.ndarray) -> None:
    """`target[...] = value`, of which `value` may be transposed, block by block.

    bfloat16 is the upper half of a float32, and is shifted there, in the order of `value`: NumPy converts one element
    after the other, and does what is transposed more slowly than what is not.
    """
    shifted = target.dtype == np.float32 and value.dtype == jnp.bfloat16
    if shifted:
        target, value = target.view(np.uint32), value.view(np.uint16)
    for block in _blocks(value, target):
        target[block] = np.left_shift(value[block], 16, dtype=np.uint32) if shifted else value[block]


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """Indices of blocks of arrays of one shape that lie in pieces of some length in each, in the order of the first."""
    shape = arrays[0].shape
    by_stride = [sorted(range(len(shape)), key=array.strides.__getitem__) for array in arrays]
    inner = {axes[0] for axes in by_stride if axes}
    steps, room = [1] * len(shape), _BLOCK
    for axis in dict.fromkeys([*inner, *by_stride[0]]):
        most = min(room, _SIDE) if len(inner) > 1 and axis in inner else room
        steps[axis] = max(1, min(shape[axis], most))
        room //= steps[axis]
    outer_first = by_stride[0][::-1]
    for corner in product(*(range(0, shape[axis], steps[axis]) for axis in outer_first)):
        starts = dict(zip(outer_first, corner, strict=True))
        yield tuple(slice(starts[axis], starts[axis] + step) for axis, step in enumerate(steps))


def _split(wanted: dict[str, Range], outer: str | None, nbytes: int, chunk: int) -> Iterator[dict[str, Range]]:
    """`wanted` in parts along the axis `outer`, each of at most `chunk` bytes, `nbytes` being those of all."""
    if outer is None or nbytes <= chunk:
        yield wanted
        return
    low, high = wanted[outer]
    step = max(1, (high - low) * chunk // nbytes)
    for start in range(low, high, step):
        yield wanted | {outer: (start, min(start + step, high))}
