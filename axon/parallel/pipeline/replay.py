"""A table run with names in place of arrays: does all work find in its slots what it needs?"""

from typing import NamedTuple

import numpy as np

from axon.errors import UserError
from axon.parallel.pipeline.periodic import ages
from axon.parallel.pipeline.slots import NONE, SHIFTS, Slots
from axon.parallel.pipeline.table import Action, Cell, Table

INPUT, GRADIENT = "input", "gradient"
RESIDUALS, LEFT = "residuals", "part left for the weights"
"""What waits by the numbers of inputs' slots, and of gradients'."""


class _Name(NamedTuple):
    """Of a chunk's input, and of its output's gradient."""

    batch: int
    microbatch: int
    logical: int

    def __str__(self) -> str:
        return f"microbatch {self.microbatch} of logical chunk {self.logical}" + (
            f", batch {self.batch}" if self.batch else ""
        )


def replay(table: Table, slots: Slots) -> None:
    """Run a table as an executor does, tick by tick, with nothing but the slots to go by; several periods of one
    without a flush.

    Raises:
        UserError: work reads a slot that does not have its input, or a slot is written while what it has is needed.
    """
    age = ages(table)
    batches = 1 if table.flush else 3
    memory = _Memory(table, slots)
    for period in range(batches + int(age.max())):
        for tick in range(table.ticks):
            sent = {}
            for stage in np.flatnonzero(table.action[tick]).tolist():
                batch = period - int(age[tick, stage])
                if 0 <= batch < batches:
                    sent[stage] = memory.run(Cell(tick, stage, table.work(tick, stage)), batch)
            memory.receive(tick, sent)


class _Memory:
    """What each slot of each stage has, and what is finished, so that its slots are free."""

    def __init__(self, table: Table, slots: Slots):
        self.table, self.slots = table, slots
        self.values: dict[tuple[str, int, int], _Name | None] = {}
        self.finished: set[_Name] = set()

    def run(self, cell: Cell, batch: int) -> _Name | None:
        """Let a cell read, and write what it makes for itself; the name of what it makes for the next or the last."""
        action, microbatch, chunk = cell.work
        last = self.table.chunks.total - 1
        name = _Name(batch, microbatch, self.table.chunks.logical(cell.stage, chunk))
        if action == Action.FORWARD and name.logical == 0:
            self._write(INPUT, cell.tick, cell.stage, self.slots.input[cell.tick, cell.stage], name)
        else:
            self._read(INPUT, cell, self.slots.input, name)
        if action == Action.FORWARD:
            self._write(RESIDUALS, cell.tick, cell.stage, self.slots.input[cell.tick, cell.stage], name)
            return name._replace(logical=name.logical + 1) if name.logical < last else None
        if name.logical < last or action == Action.BACKWARD_WEIGHT:
            self._read(GRADIENT, cell, self.slots.gradient, name)
        elif action == Action.BACKWARD_INPUT:
            self._write(GRADIENT, cell.tick, cell.stage, self.slots.gradient[cell.tick, cell.stage], name)
        self._read(RESIDUALS, cell, self.slots.input, name)
        if action == Action.BACKWARD_INPUT:
            self._write(LEFT, cell.tick, cell.stage, self.slots.gradient[cell.tick, cell.stage], name)
        elif action == Action.BACKWARD_WEIGHT:
            self._read(LEFT, cell, self.slots.gradient, name)
        if action != Action.BACKWARD_INPUT:
            self.finished.add(name)
        return name._replace(logical=name.logical - 1) if name.logical and action != Action.BACKWARD_WEIGHT else None

    def receive(self, tick: int, sent: dict[int, _Name | None]) -> None:
        """Write what arrives. A slot for which nothing was sent is written all the same, with nothing."""
        for pool, arrives in ((INPUT, self.slots.input_arrives), (GRADIENT, self.slots.gradient_arrives)):
            for number, stage in np.argwhere(arrives[tick] != NONE).tolist():
                source = (stage - SHIFTS[number]) % self.table.stages
                travels = self.slots.shift[tick, source] == SHIFTS[number]
                self._write(pool, tick, stage, arrives[tick, number, stage], sent.get(source) if travels else None)

    def _read(self, pool: str, cell: Cell, slots: np.ndarray, name: _Name) -> None:
        slot = int(slots[cell.tick, cell.stage])
        found = self.values.get((pool, cell.stage, slot))
        if found != name:
            raise UserError(
                f"tick {cell.tick}, stage {cell.stage}: {cell.work} reads the {pool} of {name} from slot {slot}, which "
                f"has {'nothing' if found is None else f'that of {found}'}"
            )

    def _write(self, pool: str, tick: int, stage: int, slot: int, name: _Name | None) -> None:
        before = self.values.get((pool, stage, int(slot)))
        if before is not None and before not in self.finished:
            raise UserError(
                f"tick {tick}, stage {stage}: the {pool} of {name} overwrites that of {before} in slot {slot}, "
                f"which is still needed"
            )
        self.values[pool, stage, int(slot)] = name
