"""How the forward TPU kernel cuts an attention: the tiles with which a mask leaves least to compute."""

from typing import Any, NamedTuple

import numpy as np

from axon.kernels.attention.mask import Mask
from axon.kernels.attention.tiles import LANES, Grid, Tiles


class ForwardTiles(NamedTuple):
    """A grid whose tiles of keys are *blocks*, of 128 or 256 keys, and how many of them a step fetches and meets.

    A step's keys begin at any block. All of a step's blocks are met at once where nothing of them is masked; else two
    at a time, and the last by itself, so that no block beyond the last is computed.
    """

    grid: Grid
    blocks: int

    def computed_pairs(self, mask: Mask, start: int = 0) -> int:
        """Pairs of a head's query and a key that the kernel computes, seen or not; documents reduce them."""
        low, high = self.grid.key_range(mask, start, np)
        return int(np.sum(high - low)) * self.grid.queries * self.grid.keys

    def steps(self, mask: Mask, start: Any) -> int:
        """Steps of the grid that a tile of queries needs at most."""
        return -(-self.grid.steps(mask, start) // self.blocks)

    def _cost(self, mask: Mask, start: int, overhead: int) -> int:
        """Pairs computed by a group, and the overhead of each meeting: one where a step's keys are all seen."""
        grid, blocks = self.grid, self.blocks
        low, high = (end[:, None] for end in grid.key_range(mask, start, np))
        query = start + np.arange(grid.query_tiles)[:, None] * grid.queries
        key = low + np.arange(self.steps(mask, start)) * blocks
        met = np.clip(high - key, 0, blocks)
        whole = mask.sees_all(query, query + grid.queries, key * grid.keys, (key + blocks) * grid.keys)
        meetings = np.where(whole & (met == blocks), 1, -(-met // 2))
        return self.computed_pairs(mask, start) * grid.group + overhead * int(np.sum(meetings))


def forward_tiles(
    tiles: Tiles, mask: Mask, group: int, real_queries: int, real_keys: int, start: int | None, least_keys: int = LANES
) -> ForwardTiles:
    """The tiles of least cost within `tiles`, of blocks of `least_keys` at least; a `start` known only at run time,
    None, is taken as that of the last keys."""
    place = max(0, real_keys - real_queries) if start is None else start
    most = max(LANES, tiles.rows // group // LANES * LANES)
    sizes = [queries for queries in (LANES, 2 * LANES, 4 * LANES, 8 * LANES) if queries < most]
    grids = [
        Grid.of(queries * group, keys, group, real_queries, real_keys)
        for queries in (*sizes, most)
        for keys in (2 * LANES, LANES)
        if least_keys <= keys <= max(tiles.keys, least_keys)
    ]
    cuts = [ForwardTiles(grid, _blocks(grid.steps(mask, place), tiles.keys // grid.keys)) for grid in grids]
    return min(cuts, key=lambda cut: cut._cost(mask, place, tiles.overhead))


def _blocks(reached: int, most: int) -> int:
    """Blocks of a step, so that as few even steps as may be hold those that a tile of queries reaches."""
    steps = -(-reached // max(1, most))
    return -(-reached // steps)
