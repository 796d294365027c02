"""New keys and values into their pages on a TPU: whole tiles, read, changed and written back in place.

One token of a page is less than a tile, the least that a copy between HBM and VMEM moves. So new tokens are laid out in
aligned groups of slots, and the page's other slots go back as they were. The copies of many groups are in flight
together: a step waits for HBM twice, however many groups it has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.paged_attention.cache import Cache, new_tokens
from axon.kernels.paged_attention.groups import KernelTables, SlotGroups
from axon.kernels.paged_attention.tpu_stream import along_lanes

TILE_BYTES = 32
"""Rows of a tile times bytes of a number: 8 rows of float32, 16 of bfloat16, 32 of int8.

Of an array whose rows these do not divide, as 48 of int8, the compiler makes smaller tiles, of 8 rows.
"""

IN_FLIGHT = 2**20
"""Bytes of an array that are in flight together, about: 32 groups of 16 slots of 8 heads of 128 bfloat16s."""

MOST_GROUPS = 128
"""In flight together, of however few bytes: each has two semaphores, and 512 are more than a core has left."""

READ, SENT = 0, 1
"""The ways of a copy: from a page, and to it."""


def write_tpu(cache: Cache, k: Array, v: Array, tables: KernelTables, *, interpret: Any = False) -> Cache:
    """See `axon.kernels.paged_attention.cache.write`; a padding row writes nothing.

    `tables.groups` has groups of `group_slots` for keys and values, `tables.pages` whole pages for their scales.
    """
    assert tables.groups is not None
    new = new_tokens(cache, k, v)
    put = partial(_put, interpret=interpret)
    if along_lanes(cache):
        old = [a.swapaxes(2, 3) for a in (cache.keys, cache.values)]
        new_keys, new_values = (a.swapaxes(2, 3) for a in put(old, (new.keys, new.values), tables.groups, axis=2))
    else:
        new_keys, new_values = put((cache.keys, cache.values), (new.keys, new.values), tables.groups, axis=1)
    scales = [a for a in (cache.key_scales, cache.value_scales) if a is not None]
    new_scales = [a for a in (new.key_scales, new.value_scales) if a is not None]
    if not scales:
        return Cache(new_keys, new_values)
    assert tables.pages is not None
    return Cache(new_keys, new_values, *put(scales, new_scales, tables.pages, axis=1))


def group_slots(cache: Cache) -> int:
    """Slots of a group of keys or values: a tile's, or fewer, so that no group lies across two pages; or, where tokens
    lie along lanes, which no copy cuts, a page's."""
    tile = TILE_BYTES // cache.keys.dtype.itemsize
    return cache.page_size if along_lanes(cache) else math.gcd(cache.page_size, tile)


def _put(
    cached: Sequence[Array], new: Sequence[Array], groups: SlotGroups, *, axis: int, interpret: Any
) -> Sequence[Array]:
    """Arrays of pages with the groups' tokens from `tokens kv_heads …` ones; `axis`: of a page, along which slots lie.

    A page is `kv_heads page_size …`, or `kv_heads … page_size`.
    """
    count, size = groups.rows.shape
    heads, *rest = new[0].shape[1:]
    tile = (heads, size, *rest) if axis == 1 else (heads, *rest, size)
    together = max(1, min(count, MOST_GROUPS, IN_FLIGHT // (math.prod(tile) * cached[0].dtype.itemsize)))
    steps = -(-count // together)
    groups = groups.padded(steps * together)
    laid = [jnp.moveaxis(a.at[groups.rows].get(mode="clip"), 1, 1 + axis) for a in new]
    scalars = [groups.pages, groups.parts, groups.first, groups.last]
    fresh = pl.BlockSpec((together, *tile), lambda step, *_: (step, *(0 for _ in tile)))
    in_hbm = [pl.BlockSpec(memory_space=pl.ANY) for _ in cached]
    first = len(scalars) + len(laid)
    return pl.pallas_call(
        partial(_put_kernel, axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[*(fresh for _ in laid), *in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                *(pltpu.VMEM((together, *tile), a.dtype) for a in cached),
                pltpu.SemaphoreType.DMA((2, together)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in cached],
        input_output_aliases={first + i: i for i in range(len(cached))},
        # Each copy would check its two addresses; the interpreter checks them in the tests.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_write",
    )(*(a.astype(jnp.int32) for a in scalars), *laid, *cached)


def _put_kernel(axis: int, pages: Any, parts: Any, first: Any, last: Any, *refs: Any) -> None:
    """One step's groups: the tiles of which a part stays are read, all at once; each is changed, and sent at once."""
    count = len(refs) // 4
    new, cached, tiles = refs[:count], refs[2 * count : 3 * count], refs[3 * count : -1]
    begin = pl.program_id(0) * tiles[0].shape[0]
    step = _Step(begin, (pages, parts, first, last), cached, tiles, refs[-1], axis)

    def change(place):
        pl.when(step.stays_partly(place))(lambda: step.copy(place, READ, "wait"))
        step.change(place, new)
        step.copy(place, SENT, "start")

    step.each(step.stays_partly, lambda place: step.copy(place, READ, "start"))
    step.each(step.is_real, change)
    step.each(step.is_real, lambda place: step.copy(place, SENT, "wait"))


@dataclass(frozen=True)
class _Step:
    """The groups of one grid step, and the copies of their tiles.

    Args:
        begin: the first of them. scalars: of every group, in SMEM, pages, parts, first and last.
        cached: the arrays of pages in HBM.
        tiles: for each of them room for a step's, in VMEM. arrived: a semaphore for each way and group.
        axis: of a page, along which its slots lie.
    """

    begin: Any
    scalars: Sequence[Any]
    cached: Sequence[Any]
    tiles: Sequence[Any]
    arrived: Any
    axis: int

    @property
    def size(self) -> int:
        """Slots of a group."""
        return self.tiles[0].shape[1 + self.axis]

    def of(self, place: Any) -> list[Any]:
        """A group's page, part, first and last slot that gets something new."""
        return [scalar[self.begin + place] for scalar in self.scalars]

    def is_real(self, place: Any) -> Any:
        *_, first, last = self.of(place)
        return first < last

    def stays_partly(self, place: Any) -> Any:
        """Whether some slots of a real group stay as they are."""
        *_, first, last = self.of(place)
        return (first < last) & (last - first < self.size)

    def each(self, condition: Callable[[Any], Any], act: Callable[[Any], None]) -> None:
        """`act` for the place of each group that meets a condition."""

        def visit(place, _):
            pl.when(condition(place))(lambda: act(place))

        lax.fori_loop(0, self.tiles[0].shape[0], visit, None)

    def copy(self, place: Any, way: int, act: str) -> None:
        """Start a group's copies, or wait for them."""
        page, part, *_ = self.of(place)
        for cached, tiles in zip(self.cached, self.tiles, strict=True):
            whole = cached.shape[1 + self.axis] == self.size
            own = cached.at[page] if whole else cached.at[page, :, _slots(part, self.size)]
            ends = (own, tiles.at[place]) if way == READ else (tiles.at[place], own)
            getattr(pltpu.make_async_copy(*ends, self.arrived.at[way, place]), act)()

    def change(self, place: Any, new: Sequence[Any]) -> None:
        """A group's new tokens into its tiles."""
        *_, first, last = self.of(place)
        for fresh, tiles in zip(new, self.tiles, strict=True):
            slot = lax.broadcasted_iota(jnp.int32, tiles.shape[1:], self.axis)
            wide = jnp.int32 if jnp.issubdtype(tiles.dtype, jnp.integer) else jnp.float32
            changed = (slot >= first) & (slot < last)
            kept = jnp.where(changed, fresh[place].astype(wide), tiles[place].astype(wide))
            tiles[place] = kept.astype(tiles.dtype)


def _slots(part: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(part * size, size), size)
