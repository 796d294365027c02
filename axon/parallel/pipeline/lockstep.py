"""Any schedule with ticks that are the same action on every stage, for one program that all stages run together."""

import itertools
from collections.abc import Sequence

from axon.errors import UserError
from axon.parallel.pipeline.order import Orders, earliest
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.table import Action, Cell, Table

Round = list[Cell]
"""What the stages do in one tick: all the same action."""


def lockstep(table: Table) -> Table:
    """The table with uniform ticks in which each stage does its forwards in their order, and so each other action.

    Stages that wait for each other after every tick, as those of one SPMD program do, lose nothing then to a stage
    with a longer action, and a collective in an action is met by all. How forwards, backwards and weights take turns
    is new. Each has as few ticks as its order allows, so that no uniform table with these orders takes less time,
    whatever the costs; and a backward comes when its inputs are there, with one round of forwards between one and the
    next, so as to keep little. So ticks repeat: 1F1B and interleaved are forwards, then a backward and a forward in
    turn, then backwards (see `phases`). A table with some backward split has all split.

    For p stages, m microbatches, v chunks placed in a loop there are `v·m + p − 1` ticks of forwards, as many of
    backwards, and `v·m` of weights if split. 1F1B and interleaved lose no time by it; 1F1B's stage s keeps
    `min(m, 2(p − 1 − s) + 1)` microbatches, and interleaved no more than before. Split backwards lose
    `(p − 1)·(F + I)/v`, which is `(p − 1)·W/v` less than whole ones, since no stage can do weights while another does
    inputs. In a V forwards take `2m + 2(p − 1)` ticks at least, and so it loses as much as H1.
    """
    if not table.flush:
        return _period(table)
    kinds = [Action.FORWARD, *([Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT] if table.split else [Action.BACKWARD])]
    rounds = [_rounds(_only(table.orders(), kind), table) for kind in kinds]
    return Table.of(_merged(rounds), table.microbatches, table.chunks)


def forwards(table: Table) -> Table:
    """The forwards of one batch alone, with a flush, in as few uniform ticks as the table's order allows."""
    rounds = _rounds(_only(unrolled(table, 1).orders(), Action.FORWARD), table)
    return Table.of([cell for cells in rounds for cell in cells], table.microbatches, table.chunks)


def _only(orders: Orders, kind: Action) -> Orders:
    """Of every stage the work of one kind; a whole backward is of each kind of backward."""
    kinds = (kind,) if kind == Action.FORWARD else (kind, Action.BACKWARD)
    return [[work._replace(action=kind) for work in order if work.action in kinds] for order in orders]


def _rounds(orders: Orders, table: Table) -> list[Round]:
    """One kind of work in as few ticks as it takes when every other kind is done."""
    cells = earliest(orders, table.chunks)
    rounds: list[Round] = [[] for _ in range(cells[-1].tick + 1)]
    for cell in cells:
        rounds[cell.tick].append(cell)
    return rounds


def _merged(kinds: Sequence[list[Round]]) -> list[Cell]:
    """A round of each kind in turn: forwards last, and each other kind if the one before has done what it needs."""
    after = [[0] * len(kinds[0]), *(_rounds_needed(*pair) for pair in itertools.pairwise(kinds))]
    done = [0] * len(kinds)
    cells, tick = [], 0
    while tick < sum(map(len, kinds)):
        for kind in (*range(1, len(kinds)), 0):
            if done[kind] < len(kinds[kind]) and after[kind][done[kind]] <= done[kind - 1]:
                cells += [cell._replace(tick=tick) for cell in kinds[kind][done[kind]]]
                done[kind] += 1
                tick += 1
    return cells


def _rounds_needed(first: list[Round], second: list[Round]) -> list[int]:
    """For each round of the second kind, how many of the first kind come before it: its own stages' inputs."""
    made = {(stage, *work[1:]): number + 1 for number, cells in enumerate(first) for _, stage, work in cells}
    return [max(made[stage, *work[1:]] for _, stage, work in cells) for cells in second]


def _period(table: Table) -> Table:
    """A period of the uniform table of many batches: from the first forward of one to that of the next."""
    if table.microbatches < 2 * table.stages - 1:
        raise UserError(
            f"{table.microbatches} microbatches on {table.stages} stages in lockstep and without a flush: some would "
            f"be in flight for longer than a batch. Use {2 * table.stages - 1} microbatches or more"
        )
    many = lockstep(unrolled(table, 5))
    begins = [
        tick
        for tick, stage, (action, microbatch, chunk) in many.cells()
        if action == Action.FORWARD and stage == chunk == microbatch % table.microbatches == 0
    ]
    period = slice(begins[2], begins[3])
    microbatch = many.microbatch[period] % table.microbatches
    return Table(many.action[period], microbatch, many.chunk[period], table.microbatches, table.chunks, flush=False)
