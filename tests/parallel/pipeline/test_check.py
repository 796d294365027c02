"""The checker accepts every schedule there is, and says of a broken one where and why."""

from dataclasses import replace

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    NONE,
    Action,
    Chunks,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    Table,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    lockstep,
    slots,
)

ALL = [GPipe(), OneFOneB(), *map(Interleaved, (1, 2, 3, 4)), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV(), TwoBW()]


def assert_right(schedule, stages: int, microbatches: int) -> None:
    if isinstance(schedule, TwoBW):
        microbatches = max(microbatches, 2 * stages - 1)
    table = schedule.table(stages, microbatches)
    assert (table.stages, table.microbatches, table.chunks.virtual) == (stages, microbatches, schedule.virtual)
    check(table)
    uniform = lockstep(table)
    check(uniform)
    assert uniform.uniform


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_every_schedule_is_right_for_any_number_of_stages_and_microbatches(schedule, rng):
    assert_right(schedule, 1, 1)
    assert_right(schedule, int(rng.integers(1, 17)), int(rng.integers(1, 65)))
    for _ in range(3):
        assert_right(schedule, int(rng.integers(1, 9)), int(rng.integers(1, 17)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(1, 17))
@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_every_schedule_is_right_everywhere(schedule, stages):
    for microbatches in (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 64):
        assert_right(schedule, stages, microbatches)


# ---- faults -----------------------------------------------------------------------------------------------------


def find(table: Table, stage: int, word: str) -> tuple[int, int]:
    """Tick and stage of a cell, as `F3/1`."""
    return next((cell.tick, stage) for cell in table.cells() if (cell.stage, str(cell.work)) == (stage, word))


def rebuilt(table: Table, arrays: np.ndarray) -> Table:
    return replace(table, action=arrays[0], microbatch=arrays[1], chunk=arrays[2])


def edited(table: Table, *cells: tuple[tuple[int, int], tuple[int, int, int]]) -> Table:
    """The table with other (action, microbatch, chunk) in some cells."""
    arrays = np.stack([table.action, table.microbatch, table.chunk])
    for at, work in cells:
        arrays[:, *at] = work
    return rebuilt(table, arrays)


def swapped(table: Table, a: tuple[int, int], b: tuple[int, int]) -> Table:
    return edited(table, (a, table.work(*b)), (b, table.work(*a)))


def without(table: Table, at: tuple[int, int]) -> Table:
    return edited(table, (at, (0, 0, 0)))


def delayed(table: Table, stage: int) -> Table:
    """The table with one stage a tick behind."""
    arrays = np.pad(np.stack([table.action, table.microbatch, table.chunk]), ((0, 0), (0, 1), (0, 0)))
    arrays[:, :, stage] = np.roll(arrays[:, :, stage], 1, axis=1)
    return rebuilt(table, arrays)


def longer(table: Table, stage: int, *work: int) -> Table:
    """The table with one tick more, in which a stage does this."""
    arrays = np.pad(np.stack([table.action, table.microbatch, table.chunk]), ((0, 0), (0, 1), (0, 0)))
    arrays[:, -1, stage] = work
    return rebuilt(table, arrays)


def periodic(actions: list[list[int]]) -> Table:
    """A table of one microbatch without a flush."""
    action = np.array(actions)
    return Table(action, 0 * action, 0 * action, 1, Chunks(action.shape[1]), flush=False)


PLAIN, HALVES, BOTH_WAYS = OneFOneB().table(4, 6), ZeroBubbleH1().table(4, 6), ZeroBubbleV().table(3, 6)

FAULTS = {
    "an action that there is none of": (
        edited(PLAIN, (find(PLAIN, 1, "F2"), (7, 2, 0))),
        r"tick \d+, stage 1: action 7 does not exist; must be in \[0, 5\)",
    ),
    "a microbatch too many": (
        edited(PLAIN, (find(PLAIN, 2, "B5"), (2, 6, 0))),
        r"tick \d+, stage 2: microbatch 6 does not exist; must be in \[0, 6\)",
    ),
    "a microbatch before the first": (
        edited(PLAIN, (find(PLAIN, 0, "F0"), (1, -1, 0))),
        "tick 0, stage 0: microbatch -1 does not exist",
    ),
    "a chunk too many": (
        edited(PLAIN, (find(PLAIN, 0, "F1"), (1, 1, 1))),
        r"stage 0: chunk 1 does not exist; must be in \[0, 1\)",
    ),
    "arrays of two lengths": (replace(PLAIN, chunk=PLAIN.chunk[1:]), "array 'chunk' is int64 .* must be of integers"),
    "arrays of other stages": (replace(PLAIN, chunks=Chunks(3)), "array 'action' is .* ticks × stages"),
    "numbers that are not whole": (replace(PLAIN, microbatch=PLAIN.microbatch / 2), "array 'microbatch' is float64"),
    "no stages": (replace(PLAIN, chunks=Chunks(0)), "at least one stage, chunk and microbatch; got 0, 1, 6"),
    "a placement that there is none of": (
        replace(PLAIN, chunks=Chunks(4, 1, "zigzag")),
        "unknown placement 'zigzag'; known: loop, V",
    ),
    "a forward that is missing": (without(PLAIN, find(PLAIN, 3, "F4")), "stage 3 never does F4"),
    "a backward that is missing": (without(PLAIN, find(PLAIN, 2, "B1")), "stage 2 never does B1"),
    "weights that are missing": (without(HALVES, find(HALVES, 2, "W1")), "stage 2 never does W1"),
    "a forward twice": (longer(PLAIN, 1, 1, 3, 0), r"tick 18, stage 1: F3 repeats what the stage does in tick \d+"),
    "weights after a whole backward": (longer(PLAIN, 1, 4, 3, 0), "stage 1: W3 repeats what"),
    "a whole backward and its parts": (
        edited(HALVES, (find(HALVES, 0, "W0"), (2, 0, 0))),
        r"stage 0: B0 repeats what the stage does in tick \d+ already",
    ),
    "an input in the tick in which it is sent": (
        delayed(PLAIN, 0),
        "tick 1, stage 1: F0 needs F0 of stage 0, which that stage does in tick 1; it can be used from tick 2 on",
    ),
    "a gradient in the tick in which it is sent": (delayed(PLAIN, 3), "stage 2: B0 needs B0 of stage 3, which"),
    "a backward before its forward": (
        swapped(PLAIN, find(PLAIN, 3, "F2"), find(PLAIN, 3, "B2")),
        "stage 3: B2 needs F2 of stage 3",
    ),
    "a gradient before it is sent": (
        swapped(PLAIN, find(PLAIN, 0, "B0"), find(PLAIN, 0, "B3")),
        "stage 0: B3 needs B3 of stage 1",
    ),
    "weights before inputs": (
        swapped(HALVES, find(HALVES, 0, "I3"), find(HALVES, 0, "W3")),
        "stage 0: W3 needs I3 of stage 0",
    ),
    "chunks in the wrong order": (
        swapped(BOTH_WAYS, find(BOTH_WAYS, 2, "F1"), find(BOTH_WAYS, 2, "F1/1")),
        "stage 2: F1/1 needs F1 of stage 2",
    ),
    "a loop for a V": (replace(BOTH_WAYS, chunks=Chunks(3, 2, "loop")), "stage [0-2]: .* needs"),
    "a period taken for a whole": (replace(TwoBW().table(4, 4), flush=True), "stage [0-3]: .* needs"),
    "two batches in flight after their own": (
        periodic([[1, 2, 1], [2, 1, 2]]),
        "tick [01], stage [01]: B0 can be no earlier than two batches after its own",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_table_is_refused_with_tick_stage_and_why(fault):
    table, message = FAULTS[fault]
    with pytest.raises(UserError, match=message):
        check(table)


def test_two_cells_that_change_places_are_refused_unless_the_table_is_still_in_order(rng):
    """Any two cells of a stage: after the change either all is still made before it is used, or the check says no."""
    refused = 0
    for _ in range(60):
        schedule = ALL[rng.integers(len(ALL) - 1)]
        table = schedule.table(int(rng.integers(2, 6)), int(rng.integers(2, 9)))
        stage = int(rng.integers(table.stages))
        a, b = rng.choice(np.flatnonzero(table.action[:, stage]), 2, replace=False).tolist()
        changed = swapped(table, (a, stage), (b, stage))
        if in_order(changed):
            check(changed)
        else:
            refused += 1
            with pytest.raises(UserError, match=r"tick \d+, stage \d+: .* needs"):
                check(changed)
    assert refused > 20


def in_order(table: Table) -> bool:
    """By hand: every chunk's forwards down the model, and its backwards up again, a tick or more apart."""
    when = {}
    for tick, stage, (action, microbatch, chunk) in table.cells():
        parts = (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT) if action == Action.BACKWARD else (action,)
        when |= {(part, microbatch, table.chunks.logical(stage, chunk)): tick for part in parts}
    forward, inputs, weights = (
        np.array([[when[kind, i, logical] for logical in range(table.chunks.total)] for i in range(table.microbatches)])
        for kind in (Action.FORWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
    )
    down, up = (np.diff(forward, axis=1) > 0).all(), (np.diff(inputs, axis=1) < 0).all()
    return bool(down and up and (inputs > forward).all() and (weights >= inputs).all())


# ---- slots ------------------------------------------------------------------------------------------------------


def test_work_that_reads_another_slot_is_refused():
    memory = slots(PLAIN)
    at = find(PLAIN, 0, "B2")
    memory.input[at] = (memory.input[at] + 1) % memory.inputs[0]
    with pytest.raises(UserError, match=rf"tick {at[0]}, stage 0: B2 .*microbatch 2 of logical chunk 0"):
        check(PLAIN, memory)


def test_a_gradient_from_another_slot_is_refused():
    memory = slots(HALVES)
    at = find(HALVES, 1, "W2")
    memory.gradient[at] += 1
    with pytest.raises(UserError, match=r"stage 1: W2 .*gradient of microbatch 2 of logical chunk 1"):
        check(HALVES, memory)


@pytest.mark.parametrize("pool", ["input_arrives", "gradient_arrives"])
def test_a_slot_that_is_written_while_it_is_needed_is_refused(pool, rng):
    memory = slots(HALVES)
    arrives = getattr(memory, pool)
    arrives[arrives != NONE] = 0
    with pytest.raises(UserError, match=r"tick \d+, stage \d: .* overwrites"):
        check(HALVES, memory)


def test_what_is_sent_the_wrong_way_does_not_arrive():
    memory = slots(BOTH_WAYS)
    memory.shift[find(BOTH_WAYS, 0, "F2")] = -1
    with pytest.raises(
        UserError, match=r"stage 1: F2 reads the input of microbatch 2 of logical chunk 1 from slot ., which has n"
    ):
        check(BOTH_WAYS, memory)


def test_what_arrives_and_is_not_written_is_missed():
    memory = slots(PLAIN)
    memory.gradient_arrives[:, :, 2] = NONE
    with pytest.raises(
        UserError, match="stage 2: B0 reads the gradient of microbatch 0 of logical chunk 2 from slot 0, which has n"
    ):
        check(PLAIN, memory)
