"""The tiles of the backward kernel, chosen by the mask: those with the least area to compute.

A tile that is partly seen is not computed whole: it is cut into blocks, and of each block of queries only the blocks
of keys that it sees are. Which blocks those are is a `Pattern`; few occur, and each is a straight piece of program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any

import numpy as np

from axon.kernels.attention.mask import Mask
from axon.kernels.attention.tiles import LANES, Grid, Tiles

Pattern = tuple[tuple[int, int], ...]
"""For each block of queries of a tile the half-open range of blocks of keys that is computed; (0, 0) for none."""

BLOCKS = (256, 128, 64)
"""Sizes of blocks that are tried, in queries and in keys."""

STEP = 64 * 1024
"""What one more step of the grid costs, in pairs."""

LONGEST_PROGRAM = 4
"""The patterns of a mask may have so many tiles' area together: all of them are in the program."""

MOST_STARTS = 16
"""Starts at most by which tiles are compared and patterns named, where it is known at run time."""

SAMPLED = 32 * 1024
"""Queries and keys at most by which tiles are compared."""


@dataclass(frozen=True)
class Rectangle:
    """Blocks of one tile that are computed at once: half-open ranges of its blocks of queries and of keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """One attention cut into tiles, and a tile into blocks, for a backward.

    Args:
        tile, block: of the same attention; the sizes of blocks divide those of tiles.
        patterns: of the tiles that are partly seen, least area first; the last one is every block where others than
            these may occur.
        whole: whether there may be tiles of which every pair is seen.
    """

    tile: Grid
    block: Grid
    patterns: tuple[Pattern, ...] = ()
    whole: bool = True

    @property
    def query_blocks(self) -> int:
        """Blocks of queries in a tile."""
        return self.tile.queries // self.block.queries

    @property
    def key_blocks(self) -> int:
        """Blocks of keys in a tile."""
        return self.tile.keys // self.block.keys

    @property
    def full(self) -> Pattern:
        """Every block of a tile."""
        return ((0, self.key_blocks),) * self.query_blocks

    def rectangles(self, pattern: Pattern) -> Iterator[Rectangle]:
        """A pattern as few rectangles: neighbouring blocks of queries that see the same keys are one."""
        for (first, last), same in groupby(range(self.query_blocks), lambda block: pattern[block]):
            blocks = list(same)
            if last > first:
                yield Rectangle((blocks[0], blocks[-1] + 1), (first, last))

    def needs(self, mask: Mask, first: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
        """For each block of queries of a tile, whose first query is `first`, the keys that it sees, from `key` on.

        Half-open ranges of keys counted from the first key of a tile, `key`, and whether it sees none of its keys.
        """
        for block in range(self.query_blocks):
            query = first + block * self.block.queries
            low, high = mask.keys(query, query + self.block.queries, self.tile.real_keys)
            low, high = low - key, high - key
            yield low, high, (high <= low) | (high <= 0) | (low >= self.tile.keys)

    def covers(self, pattern: Pattern, needs: list[tuple[Any, Any, Any]]) -> Any:
        """Whether a pattern has all pairs that are needed, from `needs`; of numbers or of traced ones."""
        found = True
        for (first, last), (low, high, nothing) in zip(pattern, needs, strict=True):
            if last == first:
                found &= nothing
            elif (first, last) != (0, self.key_blocks):
                inside = True if first == 0 else low >= first * self.block.keys
                inside &= True if last == self.key_blocks else high <= last * self.block.keys
                found &= nothing | inside
        return found

    def computed_pairs(self, mask: Mask, start: int = 0) -> int:
        """Pairs of a head's query and a key that are computed, seen or not; documents reduce them."""
        count = _count(self, mask, start)
        areas = sum(times * _area(self, self._taken(pattern)) for pattern, times in count.patterns.items())
        return (count.whole * _area(self, self.full) + areas) // self.tile.group

    def _taken(self, needed: Pattern) -> Pattern:
        """The pattern that a tile takes whose own is `needed`: the first that covers it."""
        return next(
            taken
            for taken in (*self.patterns, self.full)
            if all(b <= a or (c <= a and b <= d) for (a, b), (c, d) in zip(needed, taken, strict=True))
        )


@dataclass(frozen=True)
class _Count:
    """Tiles of one cut at one start: `patterns` with how many tiles have each, and tiles that are seen whole."""

    patterns: dict[Pattern, int]
    whole: int


def _count(cut: Tiling, mask: Mask, start: int) -> _Count:
    tile, block = cut.tile, cut.block
    first = start + np.arange(tile.query_tiles)[:, None] * tile.queries
    key = np.arange(tile.key_tiles)[None] * tile.keys
    shape = (tile.query_tiles, tile.key_tiles)
    whole = mask.sees_all(first, first + tile.queries, key, key + tile.keys) & (key + tile.keys <= tile.real_keys)
    needs = list(cut.needs(mask, first, key))
    whole = np.broadcast_to(whole, shape)
    partly = ~whole & ~np.logical_and.reduce([np.broadcast_to(nothing, shape) for _, _, nothing in needs])
    ranges = []
    for low, high, nothing in needs:
        low, high, nothing = (np.broadcast_to(x, shape)[partly] for x in (low, high, nothing))
        low, high = np.maximum(low // block.keys, 0), np.minimum(-(-high // block.keys), cut.key_blocks)
        ranges += [np.where(nothing, 0, end) for end in (low, high)]
    found, times = np.unique(np.stack(ranges, axis=1), axis=0, return_counts=True)
    patterns = {
        tuple(zip(row[::2], row[1::2], strict=True)): count
        for row, count in zip(found.tolist(), times.tolist(), strict=True)
    }
    return _Count(patterns, int(np.sum(whole)))


def _area(cut: Tiling, *patterns: Pattern) -> int:
    """Pairs of patterns, those of every head of a group."""
    return sum(last - first for pattern in patterns for first, last in pattern) * cut.block.rows * cut.block.keys


@cache
def choose_tiling(mask: Mask, tiles: Tiles, group: int, queries: int, total: int, start: int | None = 0) -> Tiling:
    """The cut of least cost, of tiles of at most the chip's size, for `queries` against `total` keys.

    `start` is that of `AttentionInputs`, None where it is known only at run time: then tiles are chosen, and patterns
    named, for queries that begin at a multiple of their number.
    """
    few, few_keys = min(queries, SAMPLED), min(total, SAMPLED)
    candidates = list(_candidates(tiles.backward_rows, tiles.backward_keys, group, few, few_keys))
    starts = _starts(few, few_keys, start)
    cheapest = min(candidates, key=lambda cut: _cost(cut, mask, starts, tiles.rectangle))
    cut = replace(
        cheapest,
        tile=replace(cheapest.tile, real_queries=queries, real_keys=total),
        block=replace(cheapest.block, real_queries=queries, real_keys=total),
    )
    counts = [_count(cut, mask, start) for start in _starts(queries, total, start)]
    whole = start is None or any(count.whole for count in counts)
    patterns = {pattern for count in counts for pattern in count.patterns}
    if _area(cut, *patterns) > LONGEST_PROGRAM * _area(cut, cut.full):
        patterns = {cut.full}
    elif start is None or (whole and mask.by_document):  # a tile that the indices allow whole may be of two documents
        patterns.add(cut.full)
    return replace(cut, patterns=tuple(sorted(patterns, key=lambda p: (_area(cut, p), p))), whole=whole)


def _starts(queries: int, total: int, start: int | None) -> tuple[int, ...]:
    """Where queries may begin: of the multiples of their number some, evenly spaced, where it is known at run time."""
    if start is not None:
        return (start,)
    places = range(0, max(1, total - queries + 1), queries)
    return tuple(places[:: -(-len(places) // MOST_STARTS)])


def _candidates(rows: int, keys: int, group: int, queries: int, total: int) -> Iterator[Tiling]:
    """Tiles of those sizes and of halves and quarters of them, and the blocks that divide each."""
    shapes = {Grid.of(rows // a, keys // b, group, queries, total) for a, b in product((1, 2, 4), (1, 2, 4))}
    for tile in sorted(shapes, key=lambda tile: (-tile.rows, -tile.keys)):
        for of_queries, of_keys in product({tile.queries, *BLOCKS}, {tile.keys, *BLOCKS}):
            whole_lanes = group * of_queries % LANES == 0
            if tile.queries % of_queries == 0 and tile.keys % of_keys == 0 and whole_lanes:
                yield Tiling(tile, replace(tile, queries=of_queries, keys=of_keys))


def _cost(cut: Tiling, mask: Mask, starts: tuple[int, ...], rectangle: int) -> float:
    """In pairs; infinite where the program would be too long."""
    counts = [_count(cut, mask, start) for start in starts]
    full, cost = _area(cut, cut.full), 0
    if _area(cut, *{pattern for count in counts for pattern in count.patterns}) > LONGEST_PROGRAM * full:
        return float("inf")
    for count in counts:
        cost += count.whole * (full + rectangle + STEP)
        for pattern, times in count.patterns.items():
            cost += times * (_area(cut, pattern) + len(list(cut.rectangles(pattern))) * rectangle + STEP)
    return cost
