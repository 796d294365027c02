"""The grid of the backward: every pair of tiles that sees each other is one step, and spans have equal work."""

import jax
import numpy as np
import pytest

from axon.kernels.attention import AttentionInputs, Causal, Everything, Prefix, SameDocument, Window
from axon.kernels.attention.tiles import Grid, reach
from axon.kernels.attention.tpu_backward_grid import Places, Spans, Tables

MASKS = (
    Everything(),
    Causal(),
    Causal() & Window(200),
    Window(150) & SameDocument(),
    Prefix(300) & Window(130),
    Causal() & SameDocument(),
)


@pytest.mark.few(mask=(MASKS[4],))
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_pair_of_tiles_that_is_seen_is_one_step_and_its_slot_is_its_own(mask, traced, rng):
    queries, keys, start = (int(size) for size in rng.integers((500, 500, 0), (1500, 1500, 300)))
    grid = Grid.of(128, 256, 1, queries, keys)
    documents = rng.integers(0, 3, (1, queries)).astype(np.int32), np.sort(rng.integers(0, 3, (1, keys)), axis=1)
    reached = jax.jit(lambda documents: reach(grid, mask, AttentionInputs(documents, start)))
    tables = jax.tree.map(np.asarray, reached(documents))
    for least in (1, 2, 3):
        spans = Spans.of(grid, mask, None if traced else start, 64, 2**30, least)
        met = steps_of(grid, spans, Tables.of(grid, spans, tables))
        for i in range(grid.query_tiles):
            keys_seen = sorted(j for tile, j, _ in met if tile == i)
            first, last = tables.first[i], tables.last[i]
            assert len(keys_seen) == len(set(keys_seen))
            assert keys_seen == [] or (keys_seen[0], keys_seen[-1]) == (first, last) or last < first
            assert last < first or {first, last} <= set(keys_seen)
        check_slots(met, spans)


def steps_of(grid, spans, tables):
    """Of all steps that have a pair of tiles: the tile of queries, that of keys, and the span with its slot."""
    places = Places(grid, spans)
    found = []
    for s in range(spans.count):
        for j in range(grid.key_tiles):
            for t in range(spans.steps):
                step = places.step(tables, 0, s, j, t)
                if bool(step.there):
                    found.append((int(step.query), j, (s, int(step.tile) % spans.steps)))
    return found


def check_slots(met, spans):
    """No tile of queries takes the slot of one whose gradient is not finished."""
    passes = {}
    for tile, j, slot in met:
        low, high, _ = passes.get(tile, (j, j, slot))
        passes[tile] = min(low, j), max(high, j), slot
    for tile, (low, high, slot) in passes.items():
        for other, (begin, end, its) in passes.items():
            assert tile == other or slot != its or high < begin or end < low


def test_spans_have_each_tile_once_and_under_a_causal_mask_equal_work(rng):
    tiles, count = 8 * int(rng.integers(1, 5)), int(rng.choice([2, 4]))
    grid = Grid.of(128, 128, 1, tiles * 128, tiles * 128)
    spans = Spans.of(grid, Causal(), 0, 64, 2**30, count)
    places = [[spans.place(s, tile) for tile in range(spans.tiles)] for s in range(spans.count)]
    assert sorted(np.ravel(places)) == list(range(tiles))
    assert len({sum(tile + 1 for tile in span) for span in places}) == 1


def test_a_window_needs_few_steps_and_slots_however_long_the_sequence():
    for length in (4096, 65536):
        grid = Grid.of(1024, 512, 8, length, length)
        assert Spans.of(grid, Causal() & Window(128), 0, 64, 2**30) == Spans(1, length // 128, 5)


def test_gradients_under_way_fit_in_their_memory(rng):
    grid = Grid.of(1024, 512, 4, 65536, 65536)
    spans = Spans.of(grid, Causal(), 0, 128, 16 * 2**20)
    assert spans.count == 8
    assert spans.steps * grid.rows * 128 * 4 <= 16 * 2**20


def test_a_start_known_at_run_time_has_steps_enough_for_any(rng):
    grid = Grid.of(128, 256, 1, int(rng.integers(500, 900)), int(rng.integers(900, 2000)))
    for mask in (Causal() & Window(int(rng.integers(1, 400))), Prefix(int(rng.integers(1, 400))) & Window(100)):
        traced = Spans.of(grid, mask, None, 64, 2**30)
        for start in rng.integers(-600, 2000, 20):
            assert Spans.of(grid, mask, int(start), 64, 2**30).steps <= traced.steps
