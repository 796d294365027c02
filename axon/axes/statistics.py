"""Statistics of a step: how values become one, and how an operation inside `einsum` reports its operands'.

What an operation sees in the backward (a cotangent) nothing returns. So it reports as gradients are reported: to an
array of zeros that takes part in the step, and whose cotangent the statistic is. A report has one value for each
device, so that devices are combined once, after the last microbatch, and no layer waits for another device.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names
from axon.axes.placing import per_device, reshard
from axon.axes.scope import current


@dataclass(frozen=True)
class Reduction:
    """How values of a statistic become one, over microbatches, devices and replicas; 0 is that of none.

    Args:
        pair: two values → one. over: (values, axis) → those along an axis as one. over_mesh_axis: (value, mesh axis) →
            those of devices, where the mesh axis is manual.
    """

    pair: Callable[[Array, Array], Array]
    over: Callable[..., Array]
    over_mesh_axis: Callable[[Any, str | Names], Any]


def largest(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
    """The largest of values that are not negative along these axes; not a number where one is none, 0 where there are
    none.

    They are compared as integers, whose order is the same: of floating-point numbers XLA's CPU compiler drops those
    that are none.
    """
    return _as_integers(lambda bits: jnp.max(bits, axis, keepdims=keepdims, initial=0), x)


def largest_magnitude(x: Array) -> Array:
    """The largest magnitude of all, float32."""
    return largest(jnp.abs(x)).astype(jnp.float32)


def _as_integers(fn: Callable[[Array], Array], x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.int16 if x.dtype.itemsize == 2 else jnp.int32)
    return lax.bitcast_convert_type(fn(bits), x.dtype)


def _largest_of_devices(value: Array, mesh_axes: str | Names) -> Array:
    return _as_integers(lambda bits: lax.pmax(bits, mesh_axes), value)


SUM = Reduction(jnp.add, jnp.sum, lax.psum)
MAX = Reduction(jnp.maximum, largest, _largest_of_devices)
"""Maximum of values that are not negative; not a number where one is none."""

OPERANDS = ("x", "w", "dy")
"""The operands of a weight's contraction and of its gradients, in the order in which they are reported."""

OperandStatistic = Callable[[Array], Array]
"""A part of an operand → a scalar that is not negative. That of the operand is the largest of its parts'."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reporting:
    """A variable's value while a step is differentiated, and the report whose cotangent its statistic is."""

    value: Array
    report: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What an operation reports, and to which array."""

    array: Array
    statistic: OperandStatistic = field(metadata={"static": True})

    def forked(self) -> tuple["Report", "Report"]:
        """The report for one use, and that for the uses after it: cotangents of one array would be added up."""

        @jax.custom_vjp
        def fork(array: Array) -> tuple[Array, Array]:
            return array, array

        fork.defvjp(lambda array: ((array, array), None), lambda _, cotangents: (MAX.pair(*cotangents),))
        one, other = fork(self.array)
        return replace(self, array=one), replace(self, array=other)


def report_axes(manual: Collection[str] = ()) -> Names:
    """The mesh axes for each of which a report has a dimension: those that do not split layers, and are not manual
    here or among `manual`."""
    scope, mesh = current(), jax.sharding.get_abstract_mesh()
    assert scope is not None
    without = {*mesh.manual_axes, *manual, *scope.placement.mesh_axes("layers", "params")}
    return tuple(axis for axis in mesh.axis_names if axis not in without)


def empty_report(
    stack: tuple[int, ...], spec: PartitionSpec, shape: tuple[int, ...], manual: Collection[str] = ()
) -> Array:
    """The zeros of a report of a statistic of this shape, one for each of `stack` layers, which lie under `spec`; for
    use where the mesh axes `manual` are that."""
    axes, mesh = report_axes(manual), jax.sharding.get_abstract_mesh()
    devices = tuple(mesh.shape[axis] for axis in axes)
    return reshard(
        jnp.zeros((*stack, *devices, *shape), jnp.float32), PartitionSpec(*spec, *axes, *[None] * len(shape))
    )


def combined_devices(report: Array, shape: tuple[int, ...], stack: int) -> Array:
    """The largest of all devices' values of a statistic of this shape, for each of the layers in front, of which
    `stack` dimensions count."""
    return largest(report, axis=tuple(range(stack, report.ndim - len(shape))))


def device_report(values: Callable[..., Sequence[Array]], specs: Sequence[PartitionSpec]) -> Callable[..., Array]:
    """The report of one use: `values` of each device's parts of the arguments, which lie under these specs, are the
    `OPERANDS`'."""
    axes = report_axes()

    def local(*parts: Array) -> Array:
        each = jnp.stack([value.astype(jnp.float32) for value in values(*parts)])
        return each.reshape((*[1] * len(axes), *each.shape))

    return per_device(local, specs, PartitionSpec(*axes, None))
