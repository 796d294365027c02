"""A schedule's table run by all stages together: gradients of a model whose blocks lie on the stages of a pipeline.

What no stage owns (the embedding, the head, the loss) is done outside of the stages, where `pipe` is a mesh axis like
any other: all stages share the work, and none repeats another's. Only the blocks run inside a region that is manual
over `pipe`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import as_cotangent, reshard
from axon.axes.patterns import Names
from axon.axes.specs import entries
from axon.parallel.pipeline.partition import Partition
from axon.parallel.pipeline.phases import phases
from axon.parallel.pipeline.rows import Rows, rows
from axon.parallel.pipeline.slots import NONE, SHIFTS
from axon.parallel.pipeline.storage import Storage
from axon.parallel.pipeline.table import Action, Table

PIPE = "pipe"
"""The mesh axis of the stages."""

FORWARD_TICK, BACKWARD_TICK = "forward tick", "backward tick"
"""The named scopes of what is done in a tick."""


@dataclass(frozen=True)
class Parts:
    """What a model and its objective are made of, as pure functions.

    Args:
        first: `(outer, microbatch number) → x`, what comes before the blocks.
        chunk: `(trained, fixed, numbers, x, inputs) → (x, extras, statistics)`, some blocks: of each segment the
            periods with these numbers, or `NOTHING`. `extras` is a tree of scalars that are added up over the chunks
            that a microbatch goes through, `statistics` one of arrays, for each segment, with an axis `layers` in
            front, without gradients, that are added up over microbatches.
        last: `(outer, x, extras, microbatch number) → (what is minimised, sums)`, what comes after the blocks.
        trained, fixed: of each segment the blocks' arrays, with an axis `layers` in front that lies on `pipe`;
            gradients are made for `trained`. outer: the parameters that are not of the blocks.
        inputs: what blocks are given of each microbatch, with an axis in front that counts these.
        partition: of each segment, the periods that each chunk runs.
    """

    first: Callable[[Any, Array], Array]
    chunk: Callable[[Any, Any, Any, Array, Any], tuple[Array, Any, Any]]
    last: Callable[[Any, Array, Any, Array], tuple[Array, Any]]
    trained: Sequence[Any]
    fixed: Sequence[Any]
    outer: Any
    inputs: Any
    partition: Sequence[Partition]


class Memory(NamedTuple):
    """What waits on a stage: slots of chunks' inputs and of outputs' gradients, and what was made last of both."""

    inputs: Any
    gradients: Any
    output: Any
    gradient: Any


class Carry(NamedTuple):
    """What goes from tick to tick: what waits, and all that is added up."""

    memory: Memory
    trained: Any
    statistics: Any
    outer: Any
    sums: Any


def execute(table: Table, parts: Parts, apart: Names = ()) -> tuple[Any, Any, Any, Any]:
    """Gradients of `parts.trained` and `parts.outer`, sums, and statistics, added up over all microbatches.

    Args:
        table: uniform, with a flush, and accepted by `check`.
        apart: mesh axes that split the batch, of which the blocks need to know nothing: no parameter of theirs is split
            over them, and nothing is summed over them but gradients. Each device keeps its own sum of these until the
            last microbatch is done, since within the stages no type can say that a sum is still to be made. Where
            chunks give extras or statistics, which may be of the whole batch, gradients are summed in each microbatch.

    The gradients of `trained` are unreduced over `apart`, if each device kept its own.
    """
    return _Executor(table, parts, apart).run()


def evaluate(table: Table, parts: Parts) -> Any:
    """The sums alone, added up over all microbatches: `table` has forwards only."""
    return _Executor(table, parts, ()).run()[2]


class _Executor:
    def __init__(self, table: Table, parts: Parts, apart: Names):
        self.table, self.parts, self.apart = table, parts, apart
        self.rows, self.pools = rows(table)
        self.storage = [Storage(of_segment, table.chunks, PIPE) for of_segment in parts.partition]
        self.x = jax.eval_shape(parts.first, parts.outer, _number(0))
        self.extras, self.statistics = self._besides()
        if jax.tree.leaves((self.extras, self.statistics)):
            self.apart = ()
        self.manual = (PIPE, *self.apart)

    def run(self) -> tuple[Any, Any, Any, Any]:
        self.layers = self._move(Storage.to_stages, (self.parts.trained, self.parts.fixed))
        carry = self._zeros()
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
        trained, statistics = self._move(Storage.from_stages, (carry.trained, carry.statistics))
        return jax.tree.map(self._unreduced, trained, list(self.parts.trained)), carry.outer, carry.sums, statistics

    # ---- ticks ----------------------------------------------------------------------------------------------------

    def _tick(self, action: Action, of_phase: Rows) -> Callable[[Carry, Any], Carry]:
        """A tick of a phase; all ticks at this place in its body are `of_phase`."""
        if action == Action.FORWARD:
            return jax.named_scope(FORWARD_TICK)(partial(self._forward, of_phase))
        return jax.named_scope(BACKWARD_TICK)(partial(self._backward, of_phase, action))

    def _forward(self, of_phase: Rows, carry: Carry, row: Any) -> Carry:
        x = self._where(of_phase.entering, row.entering, lambda m: self.parts.first(self.parts.outer, m), self._no_x())
        of_stage = self._region(self._forward_of_stage(of_phase), (self._memory, self._statistics, self._value))
        memory, statistics, y = of_stage(carry.memory, carry.statistics, *self.layers, x, self.parts.inputs, row)
        carry = carry._replace(memory=memory, statistics=statistics)
        if np.all(of_phase.leaving == NONE):
            return carry

        def sums(microbatch: Array) -> Any:
            return jax.tree.map(jnp.add, carry.sums, self.parts.last(self.parts.outer, y[0], y[1], microbatch)[1])

        if not self._backwards:
            return carry._replace(sums=self._where(of_phase.leaving, row.leaving, sums, carry.sums))

        def loss(microbatch: Array) -> Any:
            differentiated = jax.value_and_grad(self.parts.last, argnums=(0, 1, 2), has_aux=True)
            (_, found), (outer, *dy) = differentiated(self.parts.outer, *y, microbatch)
            return jax.tree.map(jnp.add, (carry.outer, carry.sums), (outer, found)), tuple(dy)

        unchanged = (carry.outer, carry.sums), jax.tree.map(jnp.zeros_like, y)
        (outer, total), dy = self._where(of_phase.leaving, row.leaving, loss, unchanged)
        gradients = self._region(_put_of_stage, self._pool)(carry.memory.gradients, dy, row.loss)
        return carry._replace(memory=carry.memory._replace(gradients=gradients), outer=outer, sums=total)

    def _backward(self, of_phase: Rows, action: Action, carry: Carry, row: Any) -> Carry:
        of_stage = self._region(self._backward_of_stage(action, of_phase), (self._memory, self._sums, self._value[0]))
        memory, trained, dx = of_stage(carry.memory, carry.trained, *self.layers, self.parts.inputs, row)
        carry = carry._replace(memory=memory, trained=trained)
        if np.all(of_phase.beginning == NONE):
            return carry

        def embedding(microbatch: Array) -> Any:
            _, pull = jax.vjp(lambda outer: self.parts.first(outer, microbatch), self.parts.outer)
            return jax.tree.map(jnp.add, carry.outer, pull(dx)[0])

        return carry._replace(outer=self._where(of_phase.beginning, row.beginning, embedding, carry.outer))

    def _where(self, of_phase: np.ndarray, microbatch: Array, do: Callable[[Array], Any], otherwise: Any) -> Any:
        """`do(microbatch)` in those ticks of the phase in which there is one: the same on every device."""
        if np.all(of_phase == NONE):
            return otherwise
        if np.all(of_phase != NONE):
            return do(microbatch)
        return lax.cond(microbatch != NONE, lambda: do(microbatch), lambda: otherwise)

    # ---- what a stage does, in a region that is manual over `pipe` -------------------------------------------------

    def _forward_of_stage(self, of_phase: Rows) -> Callable[..., Any]:
        before, after = self._delivery(of_phase)

        def forward(
            memory: Memory, total: Any, trained: Any, fixed: Any, entering: Array, inputs: Any, row: Rows
        ) -> Any:
            own = _own(row)
            memory = before(memory, own)
            memory = memory._replace(inputs=_put(memory.inputs, (entering, self._no_extras()), own.enters))
            (x, extras), memory = _after(_get(memory.inputs, own.input), memory)
            chunk, of_chunk = self._chunk(trained, fixed, own)
            y, more, statistics = chunk(of_chunk, x, _at(inputs, own.microbatch))
            y = y, jax.tree.map(jnp.add, extras, more)
            total = self._add(total, jax.tree.map(lambda s: jnp.where(own.active, s, 0), statistics), own.chunk)
            return after(memory, own)._replace(output=_lifted(y)), total, _of_one_stage(y, own.leaves)

        return forward

    def _backward_of_stage(self, action: Action, of_phase: Rows) -> Callable[..., Any]:
        before, after = self._delivery(of_phase)

        def backward(memory: Memory, total: Any, trained: Any, fixed: Any, inputs: Any, row: Rows) -> Any:
            own = _own(row)
            memory = before(memory, own)
            needed = _get(memory.inputs, own.input), _get(memory.gradients, own.gradient)
            ((x, _), dy), memory = _after(needed, memory)
            chunk, of_chunk = self._chunk(trained, fixed, own)
            _, pull = jax.vjp(lambda trained, x: chunk(trained, x, _at(inputs, own.microbatch))[:2], of_chunk, x)
            gradient, dx = pull(dy)
            if action != Action.BACKWARD_INPUT:
                gradient = jax.tree.map(lambda d: jnp.where(own.active, d, 0)[:, None], gradient)
                total = self._add(total, gradient, own.chunk)
            memory = after(memory, own)
            if action == Action.BACKWARD_WEIGHT:
                return memory, total, jnp.zeros_like(dx)
            return memory._replace(gradient=_lifted((dx, dy[1]))), total, _of_one_stage(dx, own.begins)

        return backward

    def _delivery(self, of_phase: Rows) -> tuple[Callable[..., Memory], Callable[..., Memory]]:
        """How what was made in the tick before reaches its slots: before a stage's work where some work of the phase
        needs it at once, else after, so that it travels while the stage works."""
        inputs = _shifts(of_phase.input_arrives, self.pools.inputs)
        gradients = _shifts(of_phase.gradient_arrives, self.pools.gradients)

        def deliver(memory: Memory, own: Any) -> Memory:
            return memory._replace(
                inputs=self._arrive(memory.inputs, memory.output, own.input_arrives, inputs),
                gradients=self._arrive(memory.gradients, memory.gradient, own.gradient_arrives, gradients),
            )

        def wait(memory: Memory, own: Any) -> Memory:
            return memory

        at_once = _read(of_phase.input_arrives, of_phase.input, self.pools.inputs) or _read(
            of_phase.gradient_arrives, of_phase.gradient, self.pools.gradients
        )
        return (deliver, wait) if at_once else (wait, deliver)

    def _arrive(self, pool: Any, made: Any, arrives: Array, shifts: list[int]) -> Any:
        """What each stage has made to the stages that need it, and what arrives into its slot."""
        stages = self.table.stages
        for number in shifts:
            sent = jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), made)
            if SHIFTS[number]:
                pairs = [(stage, (stage + SHIFTS[number]) % stages) for stage in range(stages)]
                sent = jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, PIPE, pairs), sent)
            pool = _put(pool, sent, arrives[number])
        return pool

    def _chunk(self, trained: Any, fixed: Any, own: Any) -> tuple[Callable[..., Any], Any]:
        """`(trained, x, inputs) → …`, the stage's chunk of this tick; and its trained arrays."""
        trained, fixed, numbers = self._of_chunk((trained, fixed, self._numbers()), own.chunk)

        def chunk(trained: Any, x: Array, inputs: Any) -> Any:
            return self.parts.chunk(trained, fixed, numbers, x, inputs)

        return chunk, trained

    def _numbers(self) -> list[Array]:
        """Of each segment the numbers of the periods that this stage runs."""
        return [jnp.asarray(one.numbers, jnp.int32)[lax.axis_index(PIPE)] for one in self.storage]

    def _of_chunk(self, layers: Any, chunk: Array) -> Any:
        """Of what a stage has of its layers that of one chunk."""
        virtual = self.table.chunks.virtual
        if virtual == 1:
            return layers

        def of_chunk(x: Array) -> Array:
            each = x.shape[0] // virtual
            return lax.dynamic_slice_in_dim(x, chunk * each, each)

        return jax.tree.map(of_chunk, layers)

    def _add(self, total: Any, gradient: Any, chunk: Array) -> Any:
        """Sums with an axis `layers` in front, those of a chunk's layers added to."""

        def added(total: Array, gradient: Array) -> Array:
            start, each = chunk * gradient.shape[0], gradient.shape[0]
            if each == total.shape[0]:
                return total + gradient
            old = lax.dynamic_slice_in_dim(total, start, each)
            return lax.dynamic_update_slice_in_dim(total, old + gradient, start, 0)

        return jax.tree.map(added, total, gradient)

    def _move(self, move: Callable[..., Any], layers: tuple[Any, Any]) -> Any:
        """Layers, of each segment, from where they are stored to where they run, or back."""

        def moved(*parts: Any) -> Any:
            return tuple([move(one, of) for one, of in zip(self.storage, part, strict=True)] for part in parts)

        return self._region(moved, jax.tree.map(self._manual, tuple(map(list, layers))))(*layers)

    # ---- where things lie -----------------------------------------------------------------------------------------

    def _region(self, fn: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """`fn`, run by each stage by itself; `outputs` are the specs of what it gives, of the manual mesh axes."""

        def run(*arguments: Any) -> Any:
            specs = jax.tree.map(self._manual, arguments)
            mapped = jax.shard_map(fn, in_specs=specs, out_specs=outputs, axis_names=set(self.manual), check_vma=False)
            return mapped(*arguments)

        return run

    def _manual(self, x: Any) -> PartitionSpec:
        """The part of an array's spec that is about the mesh axes that are manual in a region."""
        split = (tuple(a for a in entries(entry) if a in self.manual) for entry in _spec(x))
        return PartitionSpec(*(axes or None for axes in split))

    @cached_property
    def _value(self) -> Any:
        """Specs of what goes from chunk to chunk."""
        return self._manual(self.x), jax.tree.map(lambda _: PartitionSpec(), self.extras)

    @cached_property
    def _pool(self) -> Any:
        """Specs of a pool of slots for it: axes for stages and slots come first."""
        return jax.tree.map(lambda spec: PartitionSpec(PIPE, None, *spec), self._value)

    @cached_property
    def _memory(self) -> Memory:
        made = jax.tree.map(lambda spec: PartitionSpec(PIPE, *spec), self._value)
        return Memory(self._pool, self._pool, made, made)

    @cached_property
    def _statistics(self) -> Any:
        """Specs of what is added up of each layer."""
        return jax.tree.map(lambda _: PartitionSpec(PIPE), self.statistics)

    @cached_property
    def _sums(self) -> Any:
        """Specs of each device's sums of gradients: an axis for the devices comes second."""
        return jax.tree.map(lambda _: PartitionSpec(PIPE, self.apart or None), list(self.parts.trained))

    def _besides(self) -> tuple[Any, Any]:
        """What chunks give besides their output: extras, and the statistics of all layers where they run, as shapes."""

        def besides(trained: Any, fixed: Any, x: Array, inputs: Any) -> Any:
            layers = (
                [one.to_stages(of) for one, of in zip(self.storage, part, strict=True)] for part in (trained, fixed)
            )
            trained, fixed, numbers = self._of_chunk((*layers, self._numbers()), _number(0))
            _, extras, statistics = self.parts.chunk(trained, fixed, numbers, x, _at(inputs, _number(0)))
            return extras, jax.tree.map(lambda s: jnp.concatenate([s] * self.table.chunks.virtual), statistics)

        self.manual = (PIPE,)
        of_stage = self._region(besides, (PartitionSpec(), PartitionSpec(PIPE)))
        return jax.eval_shape(of_stage, self.parts.trained, self.parts.fixed, self._no_x(), self.parts.inputs)

    @property
    def _backwards(self) -> bool:
        """Whether the table has backwards."""
        return bool(np.any(self.table.action > Action.FORWARD))

    def _no_x(self) -> Array:
        return reshard(jnp.zeros(self.x.shape, self.x.dtype), _spec(self.x))

    def _no_extras(self) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.extras)

    def _zeros(self) -> Carry:
        def memory(*waiting: int) -> Any:
            def empty(x: Any, spec: PartitionSpec) -> Array:
                zeros = jnp.zeros((self.table.stages, *waiting, *x.shape), x.dtype)
                return reshard(zeros, PartitionSpec(PIPE, *[None] * len(waiting), *spec))

            return empty(self.x, _spec(self.x)), jax.tree.map(lambda s: empty(s, PartitionSpec()), self.extras)

        def of_layers(value: Array, runs: int) -> Array:
            mesh = jax.sharding.get_abstract_mesh()
            shape = self.table.stages * runs, math.prod(mesh.shape[a] for a in self.apart), *value.shape[1:]
            layers, *rest = _spec(value)
            return reshard(jnp.zeros(shape, value.dtype), PartitionSpec(layers, self.apart or None, *rest))

        with_gradients = self.parts.outer if self._backwards else None
        outer = jax.tree.map(lambda v: as_cotangent(jnp.zeros(v.shape, v.dtype), v), with_gradients)
        last = jax.eval_shape(self.parts.last, self.parts.outer, self._no_x(), self._no_extras(), _number(0))
        sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), last[1])
        trained = [
            jax.tree.map(partial(of_layers, runs=one.runs), of)
            for one, of in zip(self.storage, self.parts.trained, strict=True)
        ]
        statistics = jax.tree.map(lambda s: reshard(jnp.zeros(s.shape, s.dtype), _spec(s)), self.statistics)
        waiting = Memory(memory(self.pools.inputs), memory(self.pools.gradients), memory(), memory())
        return Carry(waiting, trained, statistics, outer, sums)

    def _unreduced(self, total: Array, value: Array) -> Array:
        """Each device's sum as a part of one that is still to be made."""
        spec = _spec(value)
        return lax.reduce_sum(total, (1,), out_sharding=PartitionSpec(*spec, unreduced=frozenset(self.apart)))


def _spec(x: Any) -> PartitionSpec:
    """The spec of an array, or of one that is only described."""
    return (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).sharding.spec


def _number(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)


def _ints(row: np.ndarray) -> Array:
    return jnp.asarray(row, bool if row.dtype == bool else jnp.int32)


def _shifts(arrives: np.ndarray, slots: int) -> list[int]:
    """Numbers of the shifts by which something arrives in some tick: in any slot but the last, which nobody needs."""
    return [number for number in range(len(SHIFTS)) if np.any(arrives[:, number] != slots - 1)]


def _read(arrives: np.ndarray, read: np.ndarray, slots: int) -> bool:
    """Whether in some tick a stage reads the slot of what arrives in it."""
    return bool(np.any((arrives == read[:, None]) & (arrives != slots - 1)))


def _own(row: Rows) -> Any:
    """Of a tick's row what is about this stage, in a region that is manual over `pipe`."""
    stage = lax.axis_index(PIPE)
    return Rows(*(x[..., stage] if x.ndim else x for x in row))


def _at(tree: Any, number: Array) -> Any:
    """Of arrays with an axis in front one entry of each."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def _get(pool: Any, slot: Array) -> Any:
    """What is in a slot of a stage's pool, `[1, slots, …]`."""
    return jax.tree.map(lambda x: lax.squeeze(lax.dynamic_index_in_dim(x, slot, 1), (0, 1)), pool)


def _after(needed: Any, memory: Memory) -> tuple[Any, Memory]:
    """What a stage's work needs, from when the last tick's is done on: a compiler that changed the order of ticks that
    do not need each other would have nothing to do while results travel."""
    needed, output, gradient = lax.optimization_barrier((needed, memory.output, memory.gradient))
    return needed, memory._replace(output=output, gradient=gradient)


def _lifted(value: Any) -> Any:
    """A stage's own value, with the axis of the stages in front."""
    return jax.tree.map(lambda x: x[None], value)


def _put(pool: Any, value: Any, slot: Array) -> Any:
    """The pool with `value` in a slot."""

    def put(slots: Array, x: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(slots, lax.expand_dims(x, (0, 1)), slot, 1)

    return jax.tree.map(put, pool, value)


def _put_of_stage(pool: Any, value: Any, slots: Array) -> Any:
    return _put(pool, value, slots[lax.axis_index(PIPE)])


def _of_one_stage(x: Any, chosen: Array) -> Any:
    """What the one stage has for which `chosen` holds, on all stages; zeros if there is none."""
    return jax.tree.map(lambda leaf: lax.psum(jnp.where(chosen, leaf, 0), PIPE), x)
