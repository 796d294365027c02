"""Costs of a schedule: its time for given costs of the actions, its bubble, and how much each stage keeps."""

from dataclasses import dataclass

import numpy as np

from axon.checks import check_range
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.table import Action, Table, Work
from axon.parallel.pipeline.timeline import Piece, Timed, timeline


@dataclass(frozen=True)
class Costs:
    """Time of each action on one microbatch by one stage, in any unit. A cell takes a `virtual`-th of it.

    Attributes:
        backward_input, backward_weight: a whole backward takes the sum.
        pair: of a forward and the whole backward that follows it on its stage by another chunk, if they run as one,
            as DualPipe's F&B; what they give is there at their end. None: they run one after the other.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    pair: float | None = None

    def __post_init__(self):
        check_range(self, "(0, inf)", "forward", "backward_input", "backward_weight", "pair")

    def of_actions(self, virtual: int) -> np.ndarray:
        """The time of one cell, indexed by `Action`."""
        whole = self.backward_input + self.backward_weight
        return np.array([0, self.forward, whole, self.backward_input, self.backward_weight]) / virtual

    def of_piece(self, piece: Piece, virtual: int) -> float:
        if len(piece) > 1 and self.pair is not None:
            return self.pair / virtual
        return float(self.of_actions(virtual)[[work.action for work in piece]].sum())


@dataclass(frozen=True, eq=False)
class Figures:
    """Of one step; for a table without a flush, of one period.

    Attributes:
        time: from the first action to the last of any stage. What a step takes if stages wait for each other after
            it, as they do for the gradients' global norm.
        busy: `[stage]`, the time that a stage works.
        span: `[stage]`, from a stage's own first action to its last. The largest is what a step takes if stages go on
            to the next by themselves (Qi et al., arXiv:2401.10241, section 4, who check the norm afterwards).
        lockstep: what the table takes if no stage begins a tick before all have ended the last one: the sum over ticks
            of the longest action in each. One program for all stages takes this.
        stash: `[stage]`, the most pairs of microbatch and chunk that are at once between the start of their forward
            and the end of their last backward.
    """

    time: float
    busy: np.ndarray
    span: np.ndarray
    lockstep: float
    stash: np.ndarray

    @property
    def bubble(self) -> np.ndarray:
        """`[stage]`: time lost, of the time that the work takes: at 0.5 a step takes half as long again."""
        return self.time / self.busy - 1


def executed(table: Table, recomputed: float) -> Costs:
    """Costs of a uniform table as it runs, in forwards, where a backward computes this share of its forward again.

    Without a flush it runs its chunk again besides, and so does each part of a split one: nothing but inputs waits from
    one batch to the next. The part for the weights goes through the gradients between the chunk's layers again too.
    """
    if table.flush:
        return Costs(1, 1 + recomputed, 1)
    return Costs(1, 2 + recomputed, 3 + recomputed if table.split else 1)


def figures(table: Table, costs: Costs = Costs()) -> Figures:
    """The figures of a table that `check` accepts."""
    cost = costs.of_actions(table.chunks.virtual)
    lockstep = float(cost[table.action].max(axis=1).sum())
    if table.flush:
        first, last, busy = _extent(table, costs)
        return Figures(float(last.max() - first.min()), busy, last - first, lockstep, stash(table))
    before, after = (_extent(unrolled(table, periods), costs) for periods in (3, 4))
    _, span, busy = np.subtract(after, before)
    return Figures(float(after[1].max() - before[1].max()), busy, span, lockstep, stash(table))


def _extent(table: Table, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When each stage starts, when it ends, and how long it works in between."""
    first, last, busy = np.full(table.stages, np.inf), np.zeros(table.stages), np.zeros(table.stages)
    for one in timed(table, costs):
        first[one.stage] = min(first[one.stage], one.start)
        last[one.stage] = max(last[one.stage], one.end)
        busy[one.stage] += one.end - one.start
    return first, last, busy


def timed(table: Table, costs: Costs = Costs()) -> list[Timed]:
    """When every cell runs if each stage does its work in the table's order, as soon as it can."""
    orders = [_pieces(order, paired=costs.pair is not None) for order in table.orders()]
    return timeline(orders, table.chunks, lambda piece: costs.of_piece(piece, table.chunks.virtual))


def _pieces(order: list[Work], paired: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for work in order:
        before = pieces[-1] if pieces else ()
        if paired and len(before) == 1 and _is_pair(*before, work):
            pieces[-1] = (*before, work)
        else:
            pieces.append((work,))
    return pieces


def _is_pair(first: Work, second: Work) -> bool:
    return (first.action, second.action) == (Action.FORWARD, Action.BACKWARD) and first.chunk != second.chunk


def stash(table: Table) -> np.ndarray:
    """`[stage]`: the most that are at once between their forward and their last backward."""
    if not table.flush:
        table = unrolled(table, 3)
    change = np.zeros((table.ticks + 1, table.stages), int)
    change[:-1] += table.action == Action.FORWARD
    change[1:] -= (table.action == Action.BACKWARD) | (table.action == Action.BACKWARD_WEIGHT)
    return np.cumsum(change, axis=0).max(axis=0)
