"""From what each stage does in turn to a table: the ticks follow from what waits for what."""

from collections.abc import Sequence

from axon.errors import UserError
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.table import LETTERS, Action, Cell, Step, Table, Work, step_of
from axon.parallel.pipeline.timeline import timeline

Orders = Sequence[Sequence[Work]]
"""For each stage, its work in turn."""

ACTIONS = {letter: action for action, letter in LETTERS.items()}


class Writer:
    """Writes one stage's work: it counts microbatches, each kind of work on each chunk by itself."""

    def __init__(self):
        self.work: list[Work] = []

    def add(self, kinds: str, times: int = 1) -> None:
        """`add("F1 I0", 2)`: twice a forward by chunk 1 and an inputs' backward by chunk 0, of their next microbatches.

        `W` without a chunk is the weights' backward that has waited longest for its turn.
        """
        for kind in kinds.split() * times:
            self.work.append(self._longest_waiting() if kind == "W" else self._next(kind))

    def count(self, kind: str) -> int:
        """Of how many microbatches it is written. A whole backward counts as one of the inputs too, and vice versa."""
        letters, chunk = "BI" if kind[0] in "BI" else kind[0], int(kind[1:])
        return sum(LETTERS[work.action] in letters and work.chunk == chunk for work in self.work)

    def _next(self, kind: str) -> Work:
        return Work(ACTIONS[kind[0]], self.count(kind), int(kind[1:]))

    def _longest_waiting(self) -> Work:
        done = {work for work in self.work if work.action == Action.BACKWARD_WEIGHT}
        split = (work for work in self.work if work.action == Action.BACKWARD_INPUT)
        return next(w for work in split if (w := work._replace(action=Action.BACKWARD_WEIGHT)) not in done)


def from_orders(orders: Orders, microbatches: int, chunks: Chunks) -> Table:
    """The table in which every stage does its work in this order, in the fewest ticks of one action each.

    Backwards run as early as they can, and forwards as late as they can without a tick more: then no input waits in
    a stage's memory for longer than it must. Work on microbatches past the last is left out, so that an order written
    for a multiple of the stages does for any number.
    """
    if microbatches < 1:
        raise UserError(f"a pipeline needs at least one microbatch; got {microbatches}")
    orders = [[work for work in order if work.microbatch < microbatches] for order in orders]
    return Table.of(_with_late_forwards(earliest(orders, chunks), chunks), microbatches, chunks)


def earliest(orders: Orders, chunks: Chunks) -> list[Cell]:
    """Each stage's work in its order, one in a tick, as early as it can. Raises as `timeline` does."""
    timed = timeline([[(work,) for work in order] for order in orders], chunks, lambda _: 1)
    return [Cell(int(one.start), one.stage, *one.piece) for one in timed]


def _with_late_forwards(cells: list[Cell], chunks: Chunks) -> list[Cell]:
    """The same cells, each forward in the last tick before what follows on its stage and before its output's use."""
    following = [cells[-1].tick + 1] * chunks.stages
    used: dict[Step, int] = {}
    late = []
    for cell in reversed(cells):
        if cell.work.action == Action.FORWARD:
            step = step_of(cell.stage, cell.work, chunks)
            use = used.get(step._replace(logical=step.logical + 1), following[cell.stage])
            cell = cell._replace(tick=min(following[cell.stage], use) - 1)
            used[step] = cell.tick
        following[cell.stage] = cell.tick
        late.append(cell)
    return late
