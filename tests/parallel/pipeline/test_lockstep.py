"""Uniform ticks: what one program for all stages takes."""

import heapq

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    Action,
    Costs,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    Table,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    figures,
    forwards,
    lockstep,
)
from axon.parallel.pipeline.table import needs, result, step_of


def drawn(rng):
    stages = int(rng.integers(1, 9))
    return stages, int(rng.integers(2 * stages, 4 * stages + 1)), Costs(*rng.uniform(0.5, 2, 3))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(2), Interleaved(3)], ids=str)
def test_whole_backwards_in_a_loop_lose_no_time(schedule, rng):
    for _ in range(4):
        stages, microbatches, costs = drawn(rng)
        table = schedule.table(stages, microbatches)
        assert figures(lockstep(table), costs).lockstep == pytest.approx(figures(table, costs).time)


def test_1f1b_keeps_what_goes_to_the_last_stage_and_back(rng):
    stages, microbatches, _ = drawn(rng)
    found = figures(lockstep(OneFOneB().table(stages, microbatches)))
    wanted = np.minimum(microbatches, 2 * (stages - 1 - np.arange(stages)) + 1)
    np.testing.assert_array_equal(found.stash, wanted)


def test_h1_waits_for_weights_until_every_stage_has_some(rng):
    stages, microbatches, _ = drawn(rng)
    found = figures(lockstep(ZeroBubbleH1().table(stages, microbatches)))
    np.testing.assert_array_equal(found.stash, np.minimum(microbatches, 2 * stages - 1 - np.arange(stages)))


def test_interleaved_keeps_no_more_than_without(rng):
    stages, rounds = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    table = Interleaved(2).table(stages, stages * rounds)
    np.testing.assert_array_equal(figures(lockstep(table)).stash, figures(table).stash)


@pytest.mark.parametrize("schedule", [ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()], ids=str)
def test_split_backwards_lose_the_fill_of_forwards_and_of_inputs(schedule, rng):
    """A V's two chunks double its fill, in halves of a stage's work: the time is that of H1."""
    for _ in range(3):
        stages, microbatches, costs = drawn(rng)
        found = figures(lockstep(schedule.table(stages, microbatches)), costs)
        lost = (stages - 1) * (costs.forward + costs.backward_input)
        assert found.lockstep - found.busy == pytest.approx(lost)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()], ids=str)
def test_each_action_has_its_work_in_the_order_of_the_table(schedule, rng):
    stages, microbatches, _ = drawn(rng)
    table = schedule.table(stages, microbatches)
    for before, after in zip(table.orders(), lockstep(table).orders(), strict=True):
        for kind in (Action.FORWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT):
            assert done(after, kind) == done(before, kind)


def done(order, kind):
    kinds = (kind,) if kind == Action.FORWARD else (kind, Action.BACKWARD)
    return [work[1:] for work in order if work.action in kinds]


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2), ZeroBubbleH1(), ZeroBubbleV()], ids=str)
def test_no_other_turn_of_actions_takes_less_time(schedule, rng):
    """By search of all of them, each with the work that any stage can do at that time."""
    table, costs = schedule.table(int(rng.integers(1, 4)), int(rng.integers(1, 4))), Costs(*rng.uniform(0.5, 2, 3))
    uniform = lockstep(table)
    assert figures(uniform, costs).lockstep == pytest.approx(least_time(uniform, costs))


def least_time(table: Table, costs: Costs) -> float:
    """Dijkstra over how far each stage is with each action."""
    kinds = [kind for kind in Action if kind and (table.action == kind).any()]
    orders = [[[work for work in order if work.action == kind] for order in table.orders()] for kind in kinds]
    cost = costs.of_actions(table.chunks.virtual)
    queue, seen = [(0.0, tuple((0,) * table.stages for _ in kinds))], set()
    while queue:
        time, at = heapq.heappop(queue)
        if all(n == len(order) for row, of in zip(at, orders, strict=True) for n, order in zip(row, of, strict=True)):
            return time
        if at not in seen:
            seen.add(at)
            for kind, row in enumerate(at):
                after = tuple(n + can_do(table, orders, at, kind, stage) for stage, n in enumerate(row))
                if after != row:
                    heapq.heappush(queue, (time + float(cost[kinds[kind]]), (*at[:kind], after, *at[kind + 1 :])))
    raise AssertionError("the table cannot be done")


def can_do(table: Table, orders, at, kind: int, stage: int) -> bool:
    done = {
        result(step_of(stage, work, table.chunks))
        for row, of in zip(at, orders, strict=True)
        for stage, (n, order) in enumerate(zip(row, of, strict=True))
        for work in order[:n]
    }
    todo = orders[kind][stage][at[kind][stage] :][:1]
    return any(done.issuperset(needs(step_of(stage, work, table.chunks), table.chunks)) for work in todo)


def test_without_a_flush_there_is_no_bubble_in_lockstep_either(rng):
    stages = int(rng.integers(1, 6))
    table = lockstep(TwoBW().table(stages, int(rng.integers(2 * stages - 1, 16))))
    check(table)
    found = figures(table)
    assert table.uniform
    assert found.lockstep == pytest.approx(found.busy)


def test_without_a_flush_a_batch_is_longer_than_the_way_there_and_back():
    with pytest.raises(UserError, match=r"6 microbatches on 4 stages in lockstep .* Use 7 microbatches or more"):
        lockstep(TwoBW().table(4, 6))


def test_the_forwards_of_a_table_without_a_flush_are_those_of_one_batch_from_an_empty_pipeline(rng):
    stages = int(rng.integers(1, 6))
    microbatches = int(rng.integers(2 * stages - 1, 16))
    found, plain = (forwards(lockstep(one.table(stages, microbatches))) for one in (TwoBW(), OneFOneB()))
    assert found.flush
    assert list(found.cells()) == list(plain.cells())
