"""Their arrays into ours: each shard is read on its own, from the parts of files that it is made of."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.form import Range
from axon.checkpoint.huggingface.pieces import SHOWN, Piece, Pieces, differences

CHUNK = 256 * 2**20
"""Bytes that are read at once, at most; one place along the first dimension of an array of theirs may be more."""


class Source(Protocol):
    """What `Weights` has."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray: ...
    def item_size(self, name: str) -> int: ...


def check_weights(source: Source, pieces: Pieces, unused: Sequence[str], where: str, model: str) -> None:
    """Raise one `CheckpointError` that lists each array that is missing, unexpected or of another shape."""
    if not (lines := differences(pieces, source.shapes, unused)):
        return
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise CheckpointError("\n  ".join([f"the weights in {where} are not those of {model}:", *lines[:SHOWN], *more]))


def load(
    source: Source, pieces: Pieces, abstract: Mapping[str, Any], *, chunk: int = CHUNK, put: Callable = jax.device_put
) -> dict[str, Any]:
    """Path → array of `abstract`, path → `jax.ShapeDtypeStruct` with a sharding.

    Host memory: one shard, and `chunk` bytes of theirs. What they have not, as identity layers and ids of a padded
    vocabulary, is 0.
    """
    return {path: _array(source, pieces, path, leaf, chunk, put) for path, leaf in abstract.items()}


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
    for piece in pieces.of[path]:
        fixed = len(piece.at)
        if not all(low <= place < high for place, (low, high) in zip(piece.at, ranges, strict=False)):
            continue
        target = out[tuple(place - low for place, (low, _) in zip(piece.at, ranges, strict=False))]
        _fill(source, pieces, piece, target, ranges[fixed:], chunk)
    return out


def _fill(
    source: Source, pieces: Pieces, piece: Piece, target: np.ndarray, ranges: tuple[Range, ...], chunk: int
) -> None:
    """Read one array of theirs into the part of a shard that it is, a chunk at a time."""
    form, total = piece.form, pieces.groups[piece.name]
    names = form.ours
    clipped = {name: (low, min(high, form.sizes[name])) for name, (low, high) in zip(names, ranges, strict=True)}
    if any(high <= low for low, high in clipped.values()):
        return
    per_place = source.item_size(piece.name) * form.elements(clipped, piece.start, total)
    for part in _split(clipped, form.outermost, per_place, chunk):
        value = form.read(lambda where: source.read(piece.name, where), part, piece.start, total)
        where = tuple(
            slice(part[name][0] - low, part[name][1] - low) for name, (low, _) in zip(names, ranges, strict=True)
        )
        target[where] = value


def _split(wanted: dict[str, Range], outer: str | None, nbytes: int, chunk: int) -> Iterator[dict[str, Range]]:
    """`wanted` in parts along the axis `outer`, each of at most `chunk` bytes, `nbytes` being those of all."""
    if outer is None or nbytes <= chunk:
        yield wanted
        return
    low, high = wanted[outer]
    step = max(1, (high - low) * chunk // nbytes)
    for start in range(low, high, step):
        yield wanted | {outer: (start, min(start + step, high))}
