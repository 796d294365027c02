"""Segments are cut so that a tick costs least, every period is run once, and in the model's order."""

import itertools

import pytest

from axon.parallel.pipeline.partition import padding, partition, width


def in_order(times, cut, chunks):
    runs = [(segment, n) for chunk in range(chunks) for segment in range(len(times)) for n in cut[segment][chunk]]
    return runs == [(segment, n) for segment, count in enumerate(times) for n in range(count)]


def cheapest(times, costs, chunks):
    """The least cost over every way to cut the periods."""
    kinds = [segment for segment, count in enumerate(times) for _ in range(count)]
    found = []
    for cuts in itertools.combinations_with_replacement(range(len(kinds) + 1), chunks - 1):
        parts = [kinds[a:b] for a, b in itertools.pairwise((0, *cuts, len(kinds)))]
        found.append(sum(max(part.count(s) for part in parts) * cost for s, cost in enumerate(costs)))
    return min(found)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_no_cut_costs_less(segments, rng):
    for _ in range(20):
        times = [int(n) for n in rng.integers(1, 6, segments)]
        costs = [float(c) for c in rng.uniform(0.5, 2, segments)]
        chunks = int(rng.integers(1, 5))
        cut = partition(times, costs, chunks)
        assert in_order(times, cut, chunks), (times, cut)
        cost = sum(width(of_segment) * c for of_segment, c in zip(cut, costs, strict=True))
        assert cost == pytest.approx(cheapest(times, costs, chunks)), (times, costs, chunks)


def test_126_layers_on_4_stages_are_32_32_32_and_30():
    (cut,) = partition([126], [1.0], 4)
    assert [len(periods) for periods in cut] == [32, 32, 32, 30]
    assert padding(cut) == 2


def test_few_dense_layers_before_many_experts_do_not_weigh_on_every_stage():
    dense, experts = partition([3, 58], [1.0, 1.5], 16)
    assert (width(dense), width(experts)) == (2, 4)
