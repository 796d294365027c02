"""The tiles and blocks of the backward: they have every pair that is seen, and few others."""

import numpy as np
import pytest

from axon.kernels.attention import Causal, Everything, Prefix, Window
from axon.kernels.attention.backward_tiles import choose_tiling
from axon.kernels.attention.cost import pairs
from axon.kernels.attention.tiles import Tiles

TILES = Tiles()


@pytest.mark.parametrize(
    ("mask", "length", "least"),
    [
        (Causal() & Window(128), 4096, {8: 0.6}),
        (Causal() & Window(1024), 8192, {1: 0.8, 4: 0.8, 8: 0.8}),
        (Causal(), 2048, {1: 0.85, 4: 0.85, 8: 0.85}),
        (Causal(), 8192, {1: 0.94, 4: 0.94, 8: 0.94}),
    ],
    ids=str,
)
def test_most_pairs_that_are_computed_are_needed(mask, length, least):
    for group, share in least.items():
        cut = choose_tiling(mask, TILES, group, length, length)
        assert pairs(mask, length, length) / cut.computed_pairs(mask) >= share


def random_mask(rng):
    window, prefix = (int(size) for size in rng.integers(1, 700, 2))
    masks = Causal(), Causal() & Window(window), Prefix(prefix), Prefix(prefix) & Window(window), Window(window)
    return masks[rng.integers(len(masks))]


def seen_pairs(mask, queries, keys, start):
    seen = mask.allowed(start + np.arange(queries)[:, None], np.arange(keys)[None], None)
    return np.asarray(seen)


def blocks_of(cut, pattern):
    """Which pairs of a tile a pattern has, `queries keys`."""
    found = np.zeros((cut.tile.queries, cut.tile.keys), bool)
    for rectangle in cut.rectangles(pattern):
        (a, b), (c, d) = rectangle.queries, rectangle.keys
        found[a * cut.block.queries : b * cut.block.queries, c * cut.block.keys : d * cut.block.keys] = True
    return found


@pytest.mark.parametrize("traced", [False, True])
def test_every_pair_that_is_seen_is_in_the_pattern_that_a_tile_takes(traced, rng):
    for _ in range(8):
        queries, keys = (int(size) for size in rng.integers(100, 1500, 2))
        start, group = int(rng.integers(0, 400)), int(2 ** rng.integers(0, 4))
        mask = random_mask(rng)
        cut = choose_tiling(mask, TILES, group, queries, keys, None if traced else start)
        padded = np.zeros((cut.tile.query_tiles * cut.tile.queries, cut.tile.key_tiles * cut.tile.keys), bool)
        padded[:queries, :keys] = seen_pairs(mask, queries, keys, start)
        computed = 0
        for i in range(cut.tile.query_tiles):
            for j in range(cut.tile.key_tiles):
                first, key = start + i * cut.tile.queries, j * cut.tile.keys
                of_tile = padded[i * cut.tile.queries :, key:][: cut.tile.queries, : cut.tile.keys]
                whole = mask.sees_all(first, first + cut.tile.queries, key, key + cut.tile.keys)
                if not of_tile.any() or (cut.whole and whole and key + cut.tile.keys <= keys):
                    continue
                needs = list(cut.needs(mask, first, key))
                taken = next((p for p in cut.patterns if cut.covers(p, needs)), None)
                assert taken is not None
                assert not np.any(of_tile & ~blocks_of(cut, taken))
                computed += np.sum(blocks_of(cut, taken))
        assert computed <= cut.computed_pairs(mask, start) or traced


def test_a_mask_that_cuts_no_tile_has_no_blocks():
    cut = choose_tiling(Everything(), TILES, 1, 4096, 4096)
    assert cut.block == cut.tile
    assert cut.patterns == ()


def test_the_program_of_an_odd_mask_stays_short(rng):
    """Many starts, each with blocks of its own: then tiles are masked whole."""
    for _ in range(4):
        cut = choose_tiling(Causal() & Window(int(rng.integers(100, 3000))), TILES, 2, 1100, 9000, None)
        area = sum(last - first for pattern in cut.patterns for first, last in pattern)
        assert area <= 5 * sum(last - first for first, last in cut.full)
        assert cut.full in cut.patterns
