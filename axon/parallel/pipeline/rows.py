"""A uniform table and its slots as the arrays that one program for all stages runs over: a row for each tick."""

from typing import NamedTuple

import numpy as np

from axon.errors import UserError
from axon.parallel.pipeline.periodic import ages
from axon.parallel.pipeline.slots import NONE, of_spans, slots
from axon.parallel.pipeline.table import Action, Table

BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


class Rows(NamedTuple):
    """The work of each stage in each tick, `[tick, stage]` unless it says otherwise.

    A slot in which nothing is to be written or read is the last of its pool, which nobody needs: so that every stage
    writes and reads in every tick, and none has a branch of its own.

    A result is sent in the tick after the one in which it is made, so that it can travel while the stage works on what
    does not need it.

    Attributes:
        active: whether the stage works. microbatch, chunk: on what; 0 if it does not. age: of which batch that is: 1
            for the batch before, in a table without a flush (see `ages`).
        input: slot of the chunk's input. gradient: slot of its output's gradient.
        input_arrives, gradient_arrives: `[tick, shift, stage]`, slots of what was made in the tick before: see `Slots`.
        enters: slot for the input of the model's first chunk, in the tick of its forward.
        leaves: whether the stage works on the forward of the model's last chunk. loss: slot for its output's gradient,
            which the loss gives in the same tick.
        begins: whether the stage works on the backward, of inputs, of the model's first chunk.
        entering, leaving, beginning: `[tick]`, of which microbatch that is, or `NONE`.
    """

    active: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    age: np.ndarray
    input: np.ndarray
    gradient: np.ndarray
    input_arrives: np.ndarray
    gradient_arrives: np.ndarray
    enters: np.ndarray
    leaves: np.ndarray
    loss: np.ndarray
    begins: np.ndarray
    entering: np.ndarray
    leaving: np.ndarray
    beginning: np.ndarray


class Pools(NamedTuple):
    """How many slots each stage has for inputs, and for gradients, the one that nobody needs among them."""

    inputs: int
    gradients: int


class SlotBytes(NamedTuple):
    """Bytes of what waits for one microbatch and chunk on a device.

    Args:
        stream: the chunk's input, or its output's gradient. residuals: what its backward needs besides. left: what a
            backward for the inputs leaves for that for the weights. offloaded: of what the backward needs that part
            which waits in the host's memory.
    """

    stream: float
    residuals: float = 0
    left: float = 0
    offloaded: float = 0

    def total(self, pools: Pools) -> float:
        """On the device, of all slots, and of what is on its way."""
        own = pools.inputs * self.residuals + pools.gradients * self.left
        return own + (pools.inputs + pools.gradients + 2) * self.stream

    def of_stages(self, table: Table) -> np.ndarray:
        """`[stage]`: on a device of each stage, of the most chunks that it keeps at once, what their backwards need."""
        own = slots(table)
        return own.inputs * (self.stream + self.residuals) + own.gradients * self.left * table.split

    def on_host(self, table: Table) -> np.ndarray:
        """`[stage]`: of those in the host's memory."""
        return slots(table).inputs * self.offloaded


def rows(table: Table) -> tuple[Rows, Pools]:
    """The rows of a uniform table that `check` accepts, or of the forwards of one. Without a flush, what is made in the
    last tick arrives in the first one of the next period.

    The gradients of the last chunk's outputs, which the loss makes when it has the outputs, have slots of their own,
    after those of the gradients that other stages send.
    """
    memory = slots(table)
    first, last = (_of_chunk(table, logical) for logical in (0, table.chunks.total - 1))
    forward, begins = table.action == Action.FORWARD, np.isin(table.action, BACKWARDS[:2]) & first
    loss = _loss_slots(table, last) if np.isin(table.action, BACKWARDS).any() else np.full(forward.shape, NONE)
    sent, inputs = int(memory.gradients.max()), int(memory.inputs.max())
    gradients = sent + int(loss.max(initial=NONE)) + 1
    own = np.where(loss == NONE, NONE, loss + sent)

    def placed(slot: np.ndarray, spare: int) -> np.ndarray:
        return np.where(slot == NONE, spare, slot)

    return Rows(
        active=table.action != Action.IDLE,
        microbatch=table.microbatch,
        chunk=table.chunk,
        age=ages(table),
        input=placed(memory.input, inputs),
        gradient=placed(np.where(last & ~forward, own, memory.gradient), gradients),
        input_arrives=placed(_one_later(memory.input_arrives), inputs),
        gradient_arrives=placed(_one_later(memory.gradient_arrives), gradients),
        enters=placed(np.where(forward & first, memory.input, NONE), inputs),
        leaves=forward & last,
        loss=placed(np.where(forward & last, own, NONE), gradients),
        begins=begins,
        entering=_microbatch(table, forward & first),
        leaving=_microbatch(table, forward & last),
        beginning=_microbatch(table, begins),
    ), Pools(inputs + 1, gradients + 1)


def _one_later(arrives: np.ndarray) -> np.ndarray:
    """With a flush nothing that is made in the last tick arrives anywhere."""
    return np.roll(arrives, 1, axis=0)


def _of_chunk(table: Table, logical: int) -> np.ndarray:
    """`[tick, stage]`: whether a cell works on this chunk."""
    home, chunk = table.chunks.home(logical)
    stage = np.arange(table.stages)
    return (table.action != Action.IDLE) & (stage == home) & (table.chunk == chunk)


def _microbatch(table: Table, cells: np.ndarray) -> np.ndarray:
    """`[tick]`: the microbatch of the one cell of a tick that is among `cells`, or `NONE`."""
    if cells.sum(axis=1).max() > 1:
        raise UserError("a schedule whose stages work on the same chunk of the model in one tick cannot be run")
    return np.where(cells.any(axis=1), np.sum(table.microbatch * cells, axis=1), NONE)


def _loss_slots(table: Table, last: np.ndarray) -> np.ndarray:
    """`[tick, stage]`: the slot of the loss's gradient, from the forward of the last chunk to its last backward."""
    found, age = np.full(table.action.shape, NONE), ages(table)
    cells = [(tick, stage, int(table.microbatch[tick, stage])) for tick, stage in np.argwhere(last).tolist()]
    when = sorted((tick + int(age[tick, stage]) * table.ticks, microbatch) for tick, stage, microbatch in cells)
    begins, ends = {microbatch: tick for tick, microbatch in reversed(when)}, {m: tick for tick, m in when}
    spans = {m: (begins[m] % table.ticks, begins[m] % table.ticks + ends[m] - begins[m]) for m in begins}
    in_order = sorted(spans, key=spans.__getitem__)
    slot = dict(zip(in_order, of_spans([spans[m] for m in in_order], table), strict=True))
    for tick, stage, microbatch in cells:
        found[tick, stage] = slot[microbatch]
    return found
