"""Gradients of an objective on a layout: accumulated over microbatches, reduced once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes.specs import mesh_axes_of
from axon.axes.statistics import combined_devices, empty_report
from axon.layout import Placement
from axon.nn.param import VariableSpec
from axon.runtime import Runtime, flattened, nested
from axon.train.objective import Batch, Objective, Sums, means, reduced
from axon.train.state import State
from axon.train.whole_batch import Features, Linearised, WholeBatch, by_cached_gradients

Counts = Mapping[str, Array]


class GradientMethod(Protocol):
    """A way to make gradients. The ones there are: `Gradients`, and `axon.train.pipelined.PipelinedGradients`."""

    def counts(self, batch: Batch) -> Counts:
        """The divisors of the sums over this batch: added up over its microbatches."""
        ...

    def __call__(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str] = ()) -> tuple[Any, Sums]:
        """Gradients of the mean over `counts`, nested by path, under the `grads` rows; and the sums of `batch`.

        Those of the paths that are `frozen` are zeros, and not computed.
        """
        ...


@dataclass(frozen=True)
class Gradients:
    """Gradients of `objective` on the runtime's layout, which has the number of microbatches.

    `seed` is the run's: the key of dropout is folded from it and the step's number. `references`: the frozen modules
    that the objective names.
    """

    runtime: Runtime
    objective: Objective
    seed: int
    references: Mapping[str, Any] = field(default_factory=dict)

    def counts(self, batch: Batch) -> Counts:
        """The counts by which the sums over this batch are divided, added up over its microbatches."""
        return total_counts(self.objective, batch, self.runtime.layout.microbatches)

    def __call__(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str] = ()) -> tuple[Any, Sums]:
        """Gradients of the mean over `counts`, nested by path, under the `grads` rows; and the sums of `batch`.

        They are reduced once over the devices that split the batch, after the last microbatch. (With ZeRO-2, and with
        ZeRO-3 those of the split parameters, they are reduced in each microbatch: no device ever stores whole ones.)
        Gradients of the `frozen` paths are zeros, and not computed.
        """
        if isinstance(self.objective, WholeBatch) and self.runtime.layout.microbatches > 1:
            return self._by_cached_gradients(self.objective, state, batch, counts, frozen)
        stored = flattened(state.parameters)
        values = flattened(with_deferred_gradients(self.runtime, nested(jax.tree.map(axes.differentiated, stored))))
        still = {path: values.pop(path) for path in frozen}
        key = self._key(state)
        empty = empty_reports(self.runtime.variables, self.runtime.placement)

        def mean(values: Any, reports: Mapping[str, Array], part: Batch) -> tuple[Array, Sums]:
            weights = {path: axes.with_place(stored[path], value) for path, value in (values | still).items()}
            module = self.runtime.bind(nested(weights), nested(reporting(flattened(state.variables), reports)))
            part = self.objective.with_references(part, self.references)
            sums = self.objective.sums(module, part, key, **self.references)
            return sum(means(sums.minimised, counts).values(), jnp.zeros(())), sums

        def differentiated(values: Any, part: Batch) -> tuple[Any, Sums]:
            run = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)
            (_, sums), (gradients, reports) = run(values, empty, part)
            return gradients, replace(sums, statistics=sums.statistics | reports)

        if self.runtime.layout.microbatches == 1:
            gradients, sums = differentiated(values, batch)
        else:
            gradients, sums = self._accumulated(differentiated, values, batch)
        sums = with_combined_reports(sums, self.runtime.variables)
        log_idle_overlap(self.runtime)
        zeros = {path: jnp.zeros(value.shape, value.dtype) for path, value in still.items()}
        return self.runtime.reshard(nested(gradients | zeros), "grads", axes.reduce_gradient), sums

    def _key(self, state: State) -> Array:
        return jax.random.fold_in(jax.random.key(self.seed), state.step)

    def _by_cached_gradients(
        self, objective: WholeBatch, state: State, batch: Batch, counts: Counts, frozen: Collection[str]
    ) -> tuple[Any, Sums]:
        """Gradients and sums, by the features of all microbatches, see `WholeBatch`."""
        module, key = self.runtime.bind(state.parameters, state.variables), self._key(state)

        def features(_: None, part: Batch) -> tuple[None, Features]:
            part = objective.with_references(part, self.references)
            return None, objective.features(module, part, key, **self.references)[0]

        def linear(objective: Linearised, batch: Batch, counts: Counts) -> tuple[Any, Sums]:
            return replace(self, objective=objective)(state, batch, counts, frozen)

        _, parts = jax.lax.scan(features, None, microbatches(batch, self.runtime.layout.microbatches))
        return by_cached_gradients(objective, from_microbatches(parts), batch, counts, linear)

    def _accumulated(self, differentiated: Callable[..., Any], values: Any, batch: Batch) -> tuple[Any, Sums]:
        """Gradients and sums, added up over the microbatches of `batch`.

        Gradients whose rows of `grads` are not those of the parameters (ZeRO-2) are reduced in each microbatch and
        added up as these rows split them; all others once, after the last.
        """

        placement, parameters = self.runtime.placement, self.runtime.parameters
        own = {path: placement.spec(parameters[path].axes, "grads") for path in values}
        split = {path for path, spec in own.items() if spec != placement.spec(parameters[path].axes, "params")}

        def accumulate(total: Any, part: Batch) -> tuple[Any, Sums]:
            gradients, sums = differentiated(values, part)
            gradients |= {path: axes.reduce_gradient(gradients[path], own[path]) for path in split}
            return jax.tree.map(jnp.add, total, gradients), sums

        def empty(path: str, value: Array) -> Array:
            zeros = jnp.zeros(value.shape, value.dtype)
            return axes.reshard(zeros, own[path]) if path in split else axes.as_cotangent(zeros, value)

        zeros = {path: empty(path, value) for path, value in values.items()}
        gradients, sums = jax.lax.scan(accumulate, zeros, microbatches(batch, self.runtime.layout.microbatches))
        return gradients, reduced(self.runtime.variables, lambda by, x: by.over(x, axis=0), sums)


def empty_reports(variables: Mapping[str, VariableSpec], placement: Placement) -> dict[str, Array]:
    """Path → an empty report, of each variable whose statistic operations report (`axon.axes.statistics`)."""
    return {
        path: empty_report(spec.shape[: spec.stack], placement.spec(spec.axes[: spec.stack]), spec.reported)
        for path, spec in variables.items()
        if spec.reported is not None
    }


def reporting(variables: Mapping[str, Any], reports: Mapping[str, Array]) -> dict[str, Any]:
    """Path → a variable's value, with its report if it has one."""
    return {path: axes.Reporting(x, reports[path]) if path in reports else x for path, x in variables.items()}


def with_combined_reports(sums: Sums, variables: Mapping[str, VariableSpec]) -> Sums:
    """The sums, of each report one value for all devices."""

    def combined(spec: VariableSpec, statistic: Array) -> Array:
        return statistic if spec.reported is None else combined_devices(statistic, spec.reported, spec.stack)

    return replace(sums, statistics={path: combined(variables[path], x) for path, x in sums.statistics.items()})


def total_counts(objective: Objective, batch: Batch, number: int) -> Counts:
    """The divisors of the sums over a batch, added up over its `number` of microbatches.

    Not in a loop: XLA's CPU runtime does not order the all-reduces in a loop with other collectives that do not depend
    on it, and devices that take them in different orders wait for each other for ever (seen with jaxlib 0.12.0.1).
    """
    if number == 1:
        return objective.counts(batch)
    found = jax.vmap(objective.counts)(microbatches(batch, number))
    return jax.tree.map(lambda count: jnp.sum(count, axis=0), found)


def microbatches(batch: Batch, number: int) -> Batch:
    """`batch …` → `micro batch …`, strided: contiguous microbatches would each lie on a few devices only, and
    sequences would have to be sent to the others."""

    def split(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0] // number, number, *x.shape[1:]), 0, 1)

    return {name: split(value) for name, value in batch.items()}


def from_microbatches(parts: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of `microbatches`: `micro batch …` → `batch …`."""
    return {name: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]) for name, x in parts.items()}


def with_deferred_gradients(runtime: Runtime, values: Any) -> Any:
    """Parameters whose gradients are unreduced over the devices that split the batch, until they are resharded.

    Otherwise each microbatch's gradients would be reduced by themselves, with as many all-reduces.
    """
    if not axes.supports_unreduced():
        return values
    split = {a for name in ("batch", "seq") for a in runtime.placement.mesh_axes(name)}

    def deferred(value: Array) -> Array:
        spec = jax.typeof(value).sharding.spec
        return axes.reshard(value, PartitionSpec(*spec, reduced=frozenset(split.difference(mesh_axes_of(spec)))))

    return jax.tree.map(deferred, values)


def log_idle_overlap(runtime: Runtime) -> None:
    """Log the mesh axes of `Layout.overlap` over which no ring was traced."""
    scope, placement = axes.current(), runtime.placement
    sizes = placement.mesh.shape
    idle = [a for a in placement.overlap if sizes.get(a, 1) > 1 and scope and a not in scope.rings]
    if idle:
        axes.log_choice(
            "overlap",
            f"nothing is overlapped over {' and '.join(map(repr, idle))}: no matmul gathers an activation over it, "
            "or scatters one (a weight's gather, as ZeRO's, is not a ring). Take it out of Layout.overlap; for "
            "'tensor', add rows=sequence_parallel()",
        )
