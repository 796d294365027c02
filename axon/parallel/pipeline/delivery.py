"""What waits on a stage between ticks, and how it gets there."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from axon import axes
from axon.parallel.pipeline.region import PIPE
from axon.parallel.pipeline.rows import Pools, Rows
from axon.parallel.pipeline.slots import SHIFTS


class Memory(NamedTuple):
    """What waits on a stage: slots of chunks' inputs; of residuals, by the same numbers; of outputs' gradients; of what
    is left for the weights' backward, by the same numbers. And what was made last of inputs and gradients."""

    inputs: Any
    residuals: Any
    gradients: Any
    left: Any
    output: Any
    gradient: Any


@dataclass(frozen=True)
class Delivery:
    """How what was made in the tick before reaches its slots, in the ticks of a phase: `before` a stage's work where
    some work of the phase needs it at once, or where nothing travels meanwhile (see `one_by_one`); else `after`, so
    that it travels while the stage works."""

    of_phase: Rows
    pools: Pools
    stages: int

    def before(self, memory: Memory, own: Rows) -> Memory:
        return self._deliver(memory, own) if self._at_once else memory

    def after(self, memory: Memory, own: Rows) -> Memory:
        return memory if self._at_once else self._deliver(memory, own)

    @property
    def _at_once(self) -> bool:
        return (
            one_by_one()
            or _read(self.of_phase.input_arrives, self.of_phase.input, self.pools.inputs)
            or _read(self.of_phase.gradient_arrives, self.of_phase.gradient, self.pools.gradients)
        )

    def _deliver(self, memory: Memory, own: Rows) -> Memory:
        inputs = _shifts(self.of_phase.input_arrives, self.pools.inputs)
        gradients = _shifts(self.of_phase.gradient_arrives, self.pools.gradients)
        return memory._replace(
            inputs=self._arrive(memory.inputs, memory.output, own.input_arrives, inputs),
            gradients=self._arrive(memory.gradients, memory.gradient, own.gradient_arrives, gradients),
        )

    def _arrive(self, pool: Any, made: Any, arrives: Any, shifts: list[int]) -> Any:
        """What each stage has made to the stages that need it, and what arrives into its slot."""
        for number in shifts:
            sent = jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), made)
            if SHIFTS[number]:
                pairs = [(stage, (stage + SHIFTS[number]) % self.stages) for stage in range(self.stages)]
                sent = jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, PIPE, pairs), sent)
            pool = put(pool, sent, arrives[number])
        return pool


def _shifts(arrives: np.ndarray, slots: int) -> list[int]:
    """Numbers of the shifts by which something arrives in some tick: in any slot but the last, which nobody needs."""
    return [number for number in range(len(SHIFTS)) if np.any(arrives[:, number] != slots - 1)]


def _read(arrives: np.ndarray, read: np.ndarray, slots: int) -> bool:
    """Whether in some tick a stage reads the slot of what arrives in it."""
    return bool(np.any((arrives == read[:, None]) & (arrives != slots - 1)))


def get(pool: Any, slot: Any) -> Any:
    """The content of a slot of a stage's pool, `[1, slots, …]`."""
    return jax.tree.map(lambda x: lax.squeeze(lax.dynamic_index_in_dim(x, slot, 1), (0, 1)), pool)


def put(pool: Any, value: Any, slot: Any) -> Any:
    """The pool with `value` in a slot."""

    def put_leaf(slots: Array, x: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(slots, lax.expand_dims(x, (0, 1)), slot, 1)

    return jax.tree.map(put_leaf, pool, value)


def put_of_stage(pool: Any, value: Any, slots: Array) -> Any:
    """The same, of slots `[stage]`, by each stage."""
    return put(pool, value, slots[lax.axis_index(PIPE)])


def one_by_one() -> bool:
    """Whether a tick's collectives wait for those before them: on CPUs, where XLA has each device begin those that do
    not need each other in an order of its own, and devices that began different ones would wait for ever."""
    return axes.platform() == "cpu"


def begun(memory: Memory, total: Any) -> tuple[Memory, Any]:
    """What a tick begins with: where collectives go one by one, when all of the tick before is done."""
    return lax.optimization_barrier((memory, total)) if one_by_one() else (memory, total)


def all_there(needed: Any) -> Any:
    """What a pass begins with: where collectives go one by one, when all of it is there, and so when a pass is done
    that made a part of it."""
    return lax.optimization_barrier(needed) if one_by_one() else needed


def after(needed: Any, memory: Memory) -> tuple[Any, Memory]:
    """What a stage's work needs, from when the last tick's is done on: a compiler that changed the order of ticks that
    do not need each other would have nothing to do while results travel."""
    if one_by_one():
        return lax.optimization_barrier((needed, memory))
    needed, output, gradient = lax.optimization_barrier((needed, memory.output, memory.gradient))
    return needed, memory._replace(output=output, gradient=gradient)
