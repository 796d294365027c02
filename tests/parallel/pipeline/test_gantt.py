"""The picture as text."""

from axon.parallel.pipeline import Costs, GPipe, Interleaved, OneFOneB, TwoBW, lockstep
from axon.parallel.pipeline.gantt import gantt


def test_the_picture_of_two_stages():
    assert gantt(OneFOneB().table(2, 2), Costs(1, 1, 1)).splitlines()[:2] == [
        "stage 0 F0 F1 ······B0    ···B1     bubble 50.0% peak stash 2",
        "stage 1 ···F0 B0    F1 B1    ······ bubble 50.0% peak stash 1",
    ]


def test_uniform_ticks_are_drawn_in_lockstep():
    assert gantt(lockstep(OneFOneB().table(2, 2))).splitlines()[:2] == [
        "stage 0 F0 F1 ·········B0    B1     bubble 50.0% peak stash 2",
        "stage 1 ···F0 B0    F1 B1    ······ bubble 50.0% peak stash 1",
    ]


def test_rows_are_equally_long_whatever_the_costs(rng):
    text = gantt(Interleaved(2).table(3, 5), Costs(*rng.uniform(0.5, 2, 3)), width=10_000)
    rows = text.splitlines()[:3]
    assert len({len(row) for row in rows}) == 1
    assert all(row.count("F4/1") == 1 for row in rows)


def test_a_long_picture_is_cut():
    rows = gantt(GPipe().table(2, 64), width=40).splitlines()[:2]
    assert all(len(row) < 80 and "… bubble" in row for row in rows)


def test_without_a_flush_two_batches_are_drawn():
    assert "B7" in gantt(TwoBW().table(2, 4))
