"""The work of a stage in a tick, in a region that is manual over `pipe`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import differentiated, with_place
from axon.axes.statistics import empty_report
from axon.parallel.pipeline.delivery import Delivery, Memory, after, begun, get, put
from axon.parallel.pipeline.idle import unless_idle
from axon.parallel.pipeline.parts import Parts, added, largest
from axon.parallel.pipeline.region import PIPE
from axon.parallel.pipeline.residuals import Kept, Pullback
from axon.parallel.pipeline.rows import Pools, Rows
from axon.parallel.pipeline.storage import Storage
from axon.parallel.pipeline.table import Action, Table

Layers = Sequence[tuple[Any, Any]]
"""What a stage has of its layers, `trained` and `fixed`, with which a batch of each age is computed (see `ages`)."""


class AtHand(NamedTuple):
    """What a stage has in the forward of a microbatch, and again in its backward: what `Parts.chunk` is given."""

    trained: Any
    fixed: Any
    reports: Any
    numbers: Any
    x: Any
    inputs: Any
    active: Any


def pullback(chunk: Callable[..., Any], at_hand: AtHand) -> tuple[Any, Pullback, Any]:
    """A chunk's output and extras, their backward to gradients of `trained`, `reports` and `x`, and its statistics."""

    def outputs(trained: Any, reports: Any, x: Any) -> tuple[Any, Any]:
        weights = jax.tree.map(with_place, at_hand.trained, trained)
        y, extras, statistics = chunk(*at_hand._replace(trained=weights, reports=reports, x=x))
        return (y, extras), statistics

    return jax.vjp(outputs, jax.tree.map(differentiated, at_hand.trained), at_hand.reports, at_hand.x, has_aux=True)


_WHOLE = PartitionSpec(None)
"""Of the layers of a stage, which has all of its own."""


@dataclass(frozen=True)
class Stage:
    """The work of a stage.

    Args:
        parts: of which the functions and shapes are those of a batch of every age. storage: of each segment of the
            model. kept: what lies between a forward and its backward; None: nothing, the backward runs its chunk again.
    """

    table: Table
    pools: Pools
    parts: Parts
    storage: Sequence[Storage]
    kept: Kept | None = None

    def forward(self, of_phase: Rows) -> Callable[..., Any]:
        """The forward of a chunk: its memory, statistics added to those before, and what leaves the last chunk."""
        delivery = Delivery(of_phase, self.pools, self.table.stages)

        def forward(memory: Memory, total: Any, layers: Layers, entering: Any, inputs: Any, row: Rows) -> Any:
            own = _own(row)
            memory, total = begun(memory, total)
            memory = delivery.before(memory, own)
            memory = memory._replace(inputs=put(memory.inputs, entering, own.enters))
            (x, extras), memory = after(get(memory.inputs, own.input), memory)
            at_hand = self.at_hand(layers, x, _of_microbatch(inputs, own), own)
            made = unless_idle(of_phase.active, own.active, "forward", lambda: self._made(at_hand))
            ((y, more), statistics), kept = made
            memory = memory._replace(residuals=put(memory.residuals, [leaf[None] for leaf in kept], own.input))
            y = y, jax.tree.map(jnp.add, extras, more)
            statistics = jax.tree.map(lambda s: jnp.where(own.active, s, 0), statistics)
            total = self._paired(self.parts.pair, total, statistics, own)
            return delivery.after(memory, own)._replace(output=_lifted(y)), total, _of_one_stage(y, own.leaves)

        return forward

    def backward(self, action: Action, of_phase: Rows) -> Callable[..., Any]:
        """A backward of a chunk: its memory, gradients and reports with those before, and what begins the first
        chunk's."""
        delivery = Delivery(of_phase, self.pools, self.table.stages)

        def backward(memory: Memory, total: Any, layers: Layers, inputs: Any, row: Rows) -> Any:
            own = _own(row)
            memory, total = begun(memory, total)
            memory = delivery.before(memory, own)
            needed = get(memory.inputs, own.input), get(memory.gradients, own.gradient)
            ((x, _), dy), memory = after(needed, memory)
            at_hand = self.at_hand(layers, x, _of_microbatch(inputs, own), own)
            work = partial(self._found, action, at_hand, dy, memory, own)
            (*found, dx), left = unless_idle(of_phase.active, own.active, "backward", work)
            if left:
                memory = memory._replace(left=put(memory.left, [leaf[None] for leaf in left], own.gradient))
            total = [self._totals(*each, own) for each in zip((added, largest), total, found, strict=True)]
            memory = delivery.after(memory, own)
            if action == Action.BACKWARD_WEIGHT:
                return memory, total, jnp.zeros_like(x)
            return memory._replace(gradient=_lifted((dx, dy[1]))), total, _of_one_stage(dx, own.begins)

        return backward

    def _made(self, at_hand: AtHand) -> tuple[Any, Sequence[Array]]:
        """A chunk's output and extras, and its statistics; and what waits for its backward."""
        if self.kept is None:
            y, extras, statistics = self.parts.chunk(*at_hand)
            return ((y, extras), statistics), []
        return self.kept.run_forward(at_hand)

    def _found(self, action: Action, at_hand: AtHand, dy: Any, memory: Memory, own: Any) -> tuple[Any, Sequence[Array]]:
        """Gradients as `pullback` gives them, of layers their pieces, None in place of those that this action does not
        give; and what is left for the weights' backward."""
        if self.kept is None:
            _, pull, _ = pullback(self.parts.chunk, at_hand)
            *found, dx = pull(dy)
            not_yet = action == Action.BACKWARD_INPUT
            return (*jax.tree.map(lambda d: None if not_yet else [d], found), dx), []
        waited = [lax.squeeze(leaf, (0,)) for leaf in get(memory.residuals, own.input)]
        left = None
        if action == Action.BACKWARD_WEIGHT:
            left = [lax.squeeze(leaf, (0,)) for leaf in get(memory.left, own.gradient)]
        (*found, dx), left = self.kept.run_backward(at_hand, waited, dy, left)
        return (*found, dx and dx[0]), left

    def _totals(self, pair: Callable[[Any, Any], Any], total: Any, found: Any, own: Any) -> Any:
        """What was found of layers in all, of each array of which something is, piece by piece."""

        def of(total: Array, pieces: Sequence[Array] | None) -> Array:
            start = self._place(own, sum(len(piece) for piece in pieces or ()))
            for piece in pieces or ():
                new = jnp.where(own.active, piece, 0)[:, None]
                both = pair(lax.dynamic_slice_in_dim(total, start, len(piece)), new)
                total = lax.dynamic_update_slice_in_dim(total, both, start, 0)
                start = start + len(piece)
            return total

        return jax.tree.map(of, total, found)

    def _place(self, own: Any, each: int) -> Any:
        """Where a chunk's own layers begin, of each age in a row: `each` are a chunk's."""
        single = self.table.chunks.virtual == 1 and self.table.flush
        return 0 if single else (own.age * self.table.chunks.virtual + own.chunk) * each

    def at_hand(self, layers: Layers, x: Any, inputs: Any, own: Any) -> AtHand:
        """What one of the stage's chunks is given, for a batch of this age."""
        trained, fixed = _of_age([self._of_chunk(one, own.chunk) for one in layers], own.age)
        numbers = self._of_chunk(self._numbers(), own.chunk)
        return AtHand(trained, fixed, self._empty_reports(), numbers, x, inputs, own.active)

    def _numbers(self) -> list[Array]:
        """Of each segment the numbers of the periods that this stage runs."""
        return [jnp.asarray(one.numbers, jnp.int32)[lax.axis_index(PIPE)] for one in self.storage]

    def _of_chunk(self, layers: Any, chunk: Any) -> Any:
        """Of what a stage has of its layers that of one chunk."""
        virtual = self.table.chunks.virtual
        if virtual == 1:
            return layers

        def of_chunk(x: Array) -> Array:
            each = x.shape[0] // virtual
            return lax.dynamic_slice_in_dim(x, chunk * each, each)

        return jax.tree.map(of_chunk, layers)

    def _empty_reports(self) -> Any:
        """Of each segment those of one chunk's layers."""
        return [
            {path: empty_report((one.runs // self.table.chunks.virtual,), _WHOLE, shape) for path, shape in of.items()}
            for one, of in zip(self.storage, self.parts.reports, strict=True)
        ]

    def _paired(self, pair: Callable[[Any, Any], Any], total: Any, new: Any, own: Any) -> Any:
        """What was found of layers, with an axis `layers` in front, each chunk's own paired with what is new: of each
        age in a row."""

        def before(total: Array, new: Array) -> Array:
            return lax.dynamic_slice_in_dim(total, self._place(own, len(new)), len(new))

        def after(total: Array, both: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(total, both, self._place(own, len(both)), 0)

        return jax.tree.map(after, total, pair(jax.tree.map(before, total, new), new))


def _own(row: Rows) -> Any:
    """Of a tick's row what is about this stage."""
    stage = lax.axis_index(PIPE)
    return Rows(*(x[..., stage] if x.ndim else x for x in row))


def _of_age(versions: Sequence[Any], age: Any) -> Any:
    """One of several like trees, each stage its own: chosen by data, since stages may not branch apart."""
    if len(versions) == 1:
        return versions[0]
    return jax.tree.map(lambda *leaves: lax.select_n(age, *leaves), *versions)


def _of_microbatch(inputs: Sequence[Any], own: Any) -> Any:
    """What a stage's blocks are given in a tick, of the `inputs` of the batch of each age."""
    return _of_age([entry(of_batch, own.microbatch) for of_batch in inputs], own.age)


def entry(tree: Any, number: Any) -> Any:
    """Of arrays with an axis in front one entry of each."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def _lifted(value: Any) -> Any:
    """A stage's own value, with the axis of the stages in front."""
    return jax.tree.map(lambda x: x[None], value)


def _of_one_stage(x: Any, chosen: Any) -> Any:
    """What the one stage has for which `chosen` holds, on all stages; zeros if there is none."""
    return jax.tree.map(lambda leaf: lax.psum(jnp.where(chosen, leaf, 0), PIPE), x)
