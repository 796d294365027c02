"""A schedule's table run by all stages together: gradients of a model whose blocks lie on the stages of a pipeline.

What no stage owns (the embedding, the head, the loss) is done outside of the stages, where `pipe` is a mesh axis like
any other: all stages share the work, and none repeats another's. Only the blocks run inside a region that is manual
over `pipe`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import is_on_host, reshard
from axon.axes.patterns import Names
from axon.axes.statistics import combined_devices
from axon.parallel.pipeline.carry import Carry, carried
from axon.parallel.pipeline.delivery import Memory, put_of_stage
from axon.parallel.pipeline.parts import Parts, added
from axon.parallel.pipeline.phases import phases
from axon.parallel.pipeline.region import PIPE, bytes_per_device, spec_of
from axon.parallel.pipeline.rows import Rows, SlotBytes, rows
from axon.parallel.pipeline.slots import NONE
from axon.parallel.pipeline.stage import Stage
from axon.parallel.pipeline.storage import Storage
from axon.parallel.pipeline.table import Action, Table

FORWARD_TICK, BACKWARD_TICK = "forward tick", "backward tick"
"""The named scopes of what is done in a tick."""


class Results(NamedTuple):
    """What was added up over a batch's microbatches: gradients of `Parts.trained` and `Parts.outer`, sums, and
    statistics; and of each report the largest value."""

    trained: Any
    outer: Any
    sums: Any
    statistics: Any
    reports: Any


def execute(table: Table, parts: Parts, batch_only_axes: Names = ()) -> Results:
    """Gradients, sums and statistics of a batch, added up over all microbatches.

    Args:
        table: uniform, with a flush, and accepted by `check`.
        batch_only_axes: mesh axes that split the batch, of which the blocks need to know nothing: no parameter of
            theirs is split over them, and nothing is summed over them but gradients. Each device keeps its own sum of
            these until the last microbatch is done, since within the stages no type can say that a sum is still to be
            made. Where chunks give extras or statistics, which may be of the whole batch, gradients are summed in each
            microbatch.

    The gradients of `trained` are unreduced over `batch_only_axes`, if each device kept its own.
    """
    (results,), _ = _Executor(table, [parts], batch_only_axes).run()
    return results


def execute_period(
    table: Table, begun: Parts, before: Parts, memory: Memory, batch_only_axes: Names = ()
) -> tuple[Results, Results, Memory]:
    """One period of a table without a flush: a batch is begun, and the one before is finished.

    Args:
        begun, before: of either batch, with its own weights; but for what they close over and their arrays they are
            the same. memory: what the period before left; zeros before the first one.

    Returns what was added up of the batch that is begun, up to here; of the one before, from here on; and the memory.
    """
    (first, second), memory = _Executor(table, [begun, before], batch_only_axes).run(memory)
    return first, second, memory


def in_flight(table: Table, parts: Parts) -> tuple[Memory, Any, Any, Any]:
    """What is in flight after a period, but for gradients, before the first one: memory, sums, statistics, reports."""
    executor = _Executor(table, [parts, parts], ())
    carry = executor.carried.zeros(with_gradients=False)
    return carry.memory, carry.sums[0], executor.statistics(carry, 0), executor.reports(carry, 0)


def slot_bytes(table: Table, parts: Parts, batch_only_axes: Names = ()) -> SlotBytes:
    """Of arrays that are only described, while they are traced."""
    memory = _Executor(table, [parts], batch_only_axes).carried.zeros(with_gradients=False).memory

    def size(pools: Any, on_host: bool = False) -> int:
        own = (one for one in jax.tree.leaves(pools) if is_on_host(one) == on_host)
        return sum(bytes_per_device(jax.typeof(one)) // one.shape[1] for one in own)

    residuals = memory.residuals
    return SlotBytes(size(memory.inputs), size(residuals), size(memory.left), size(residuals, on_host=True))


def evaluate(table: Table, parts: Parts) -> Any:
    """The sums alone, added up over all microbatches: `table` has forwards only."""
    return execute(table, parts).sums


class _Executor:
    """Runs a table; `versions`: of a batch of each age what is run."""

    def __init__(self, table: Table, versions: Sequence[Parts], batch_only_axes: Names):
        self.table, self.versions = table, versions
        self.rows, pools = rows(table)
        storage = [Storage(of_segment, table.chunks, PIPE) for of_segment in versions[0].partition]
        stage, keeps = Stage(table, pools, versions[0], storage), table.flush and table.backwards
        self.carried = carried(versions, stage, pools, batch_only_axes, keeps)
        self.region = self.carried.region
        self.stage = replace(stage, kept=self.carried.kept)

    def run(self, memory: Memory | None = None) -> tuple[list[Results], Memory]:
        """The results of each age's batch, and what waits after the last tick."""
        self.layers = [self._move(Storage.to_stages, (parts.trained, parts.fixed)) for parts in self.versions]
        self.inputs = [parts.inputs for parts in self.versions]
        carry = self.carried.zeros(with_gradients=self.table.backwards)
        if memory is not None:
            carry = carry._replace(memory=jax.tree.map(lambda x, z: reshard(x, spec_of(z)), memory, carry.memory))
        for start, actions, times in phases(self.table):
            ticks = slice(start, start + len(actions) * times)
            of_phase = [
                Rows(*(row[ticks][place :: len(actions)] for row in self.rows)) for place in range(len(actions))
            ]
            run = [self._tick(action, of_tick) for action, of_tick in zip(actions, of_phase, strict=True)]

            def body(carry: Carry, of_ticks: list[Rows], run: Any = run) -> tuple[Carry, None]:
                for tick, row in zip(run, of_ticks, strict=True):
                    carry = tick(carry, row)
                return carry, None

            carry, _ = lax.scan(body, carry, jax.tree.map(_ints, of_phase))
        return [self._results(carry, age) for age in range(len(self.versions))], carry.memory

    # ---- ticks ----------------------------------------------------------------------------------------------------

    def _tick(self, action: Action, of_phase: Rows) -> Callable[[Carry, Any], Carry]:
        """A tick of a phase; all ticks at this place in its body are `of_phase`."""
        if action == Action.FORWARD:
            return jax.named_scope(FORWARD_TICK)(partial(self._forward, of_phase))
        return jax.named_scope(BACKWARD_TICK)(partial(self._backward, of_phase, action))

    def _forward(self, of_phase: Rows, carry: Carry, row: Any) -> Carry:
        entering = self.versions[self._age(of_phase, 0)]
        no_x, no_extras = self.carried.nothing()
        x = self._where(of_phase.entering, row.entering, lambda m: entering.first(entering.outer, m), no_x)
        specs = self.carried.memory, self.carried.of_layers, self.carried.value
        of_stage = self.region(self.stage.forward(of_phase), specs)
        memory, statistics, y = of_stage(carry.memory, carry.statistics, self.layers, (x, no_extras), self.inputs, row)
        carry = carry._replace(memory=memory, statistics=statistics)
        return carry if np.all(of_phase.leaving == NONE) else self._leave(of_phase, carry, y, row)

    def _leave(self, of_phase: Rows, carry: Carry, y: Any, row: Any) -> Carry:
        """The loss of what leaves the last chunk, and the gradients that begin there."""
        age = self._age(of_phase, self.table.chunks.total - 1)
        parts = self.versions[age]

        def sums(microbatch: Array) -> Any:
            return parts.pair_sums(carry.sums[age], parts.last(parts.outer, y[0], y[1], microbatch)[1])

        if not self.table.backwards:
            total = self._where(of_phase.leaving, row.leaving, sums, carry.sums[age])
            return carry._replace(sums=_replaced(carry.sums, age, total))

        def loss(microbatch: Array) -> Any:
            differentiated = jax.value_and_grad(parts.last, argnums=(0, 1, 2), has_aux=True)
            (_, found), (outer, *dy) = differentiated(parts.outer, *y, microbatch)
            return (added(carry.outer[age], outer), parts.pair_sums(carry.sums[age], found)), tuple(dy)

        unchanged = (carry.outer[age], carry.sums[age]), jax.tree.map(jnp.zeros_like, y)
        (outer, total), dy = self._where(of_phase.leaving, row.leaving, loss, unchanged)
        gradients = self.region(put_of_stage, self.carried.pool)(carry.memory.gradients, dy, row.loss)
        return carry._replace(
            memory=carry.memory._replace(gradients=gradients),
            outer=_replaced(carry.outer, age, outer),
            sums=_replaced(carry.sums, age, total),
        )

    def _backward(self, of_phase: Rows, action: Action, carry: Carry, row: Any) -> Carry:
        specs = self.carried.memory, self.carried.gradients, self.carried.value[0]
        of_stage = self.region(self.stage.backward(action, of_phase), specs)
        total = [carry.trained, carry.reports]
        memory, (trained, reports), dx = of_stage(carry.memory, total, self.layers, self.inputs, row)
        carry = carry._replace(memory=memory, trained=trained, reports=reports)
        if np.all(of_phase.beginning == NONE):
            return carry
        age = self._age(of_phase, 0)
        parts = self.versions[age]

        def embedding(microbatch: Array) -> Any:
            _, pull = jax.vjp(lambda outer: parts.first(outer, microbatch), parts.outer)
            return added(carry.outer[age], pull(dx)[0])

        outer = self._where(of_phase.beginning, row.beginning, embedding, carry.outer[age])
        return carry._replace(outer=_replaced(carry.outer, age, outer))

    def _where(self, of_phase: np.ndarray, microbatch: Array, do: Callable[[Array], Any], otherwise: Any) -> Any:
        """`do(microbatch)` in those ticks of the phase in which there is one: the same on every device."""
        if np.all(of_phase == NONE):
            return otherwise
        if np.all(of_phase != NONE):
            return do(microbatch)
        return lax.cond(microbatch != NONE, lambda: do(microbatch), lambda: otherwise)

    def _age(self, of_phase: Rows, logical: int) -> int:
        """Of which batch this chunk's microbatches are: in all ticks of a phase of the same."""
        stage, _ = self.table.chunks.home(logical)
        return int(of_phase.age[0, stage])

    # ---- before and after -----------------------------------------------------------------------------------------

    def _results(self, carry: Carry, age: int) -> Results:
        trained = self._stored(carry.trained, age)
        trained = jax.tree.map(self._unreduced, trained, list(self.versions[0].trained))
        return Results(
            trained, carry.outer[age], carry.sums[age], self.statistics(carry, age), self.reports(carry, age)
        )

    def reports(self, carry: Carry, age: int) -> Any:
        """Of each segment, by path, the statistics that operations reported, of all devices."""
        reports = self._stored(carry.reports, age)
        return [
            {path: combined_devices(reports[i][path], shape, 1) for path, shape in of.items()}
            for i, of in enumerate(self.versions[0].reports)
        ]

    def statistics(self, carry: Carry, age: int) -> Any:
        return self._stored(carry.statistics, age)

    def _stored(self, total: list[Any], age: int) -> Any:
        """What was added up of each layer for a batch of this age, where the layers are stored."""

        def move(storage: Storage, of_segment: Any) -> Any:
            if len(self.versions) > 1:
                places = slice(age * storage.runs, (age + 1) * storage.runs)
                of_segment = jax.tree.map(lambda x: x[places], of_segment)
            return storage.from_stages(of_segment)

        return self._move(move, (total,))[0]

    def _move(self, move: Callable[..., Any], layers: tuple[Any, ...]) -> Any:
        """Layers, of each segment, from where they are stored to where they run, or back."""

        def moved(*parts: Any) -> Any:
            return tuple([move(one, of) for one, of in zip(self.stage.storage, part, strict=True)] for part in parts)

        return self.region(moved, jax.tree.map(self.region.spec, tuple(map(list, layers))))(*layers)

    def _unreduced(self, total: Array, value: Array) -> Array:
        """Each device's sum as a part of one that is still to be made."""
        spec, batch_only_axes = spec_of(value), frozenset(self.region.batch_only_axes)
        return lax.reduce_sum(total, (1,), out_sharding=PartitionSpec(*spec, unreduced=batch_only_axes))


def _replaced(of_ages: tuple[Any, ...], age: int, value: Any) -> tuple[Any, ...]:
    return (*of_ages[:age], value, *of_ages[age + 1 :])


def _ints(row: np.ndarray) -> Array:
    return jnp.asarray(row, bool if row.dtype == bool else jnp.int32)
