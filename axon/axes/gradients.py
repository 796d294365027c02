"""Gradients on their way from an operation: where they must lie, and which sums over devices are still to be made."""

from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from axon.axes.placing import current_explicit, reshard
from axon.axes.scope import current
from axon.errors import UserError


def as_cotangent(gradient: Array, weight: Array) -> Array:
    """`gradient` summed over devices as far as the type of `weight` asks, in the dtype that it comes in.

    A weight that is *reduced* over a mesh axis receives a gradient that is *unreduced* over it: the sum over devices
    happens once, after the last microbatch, by `reduce_gradient`. Without that each microbatch would pay for it. Where
    the weight is sharded and the gradient is partial, the move is a reduce-scatter: the transpose of the gather.
    """
    return of_type(gradient, jax.typeof(weight))


def of_type(gradient: Array, weight: Any) -> Array:
    """The same, of the weight's type."""
    if not current_explicit():
        return gradient.astype(weight.dtype)
    spec, current = weight.sharding.spec, jax.typeof(gradient).sharding.spec.unreduced
    if current - spec.reduced and spec.reduced - current:  # XLA ends the process where both are to change at once
        gradient = reshard(gradient, PartitionSpec(*spec.partitions, unreduced=spec.reduced & current))
    return reshard(gradient, PartitionSpec(*spec.partitions, unreduced=spec.reduced)).astype(weight.dtype)


def reduce_gradient(gradient: Array, spec: PartitionSpec) -> Array:
    """A weight's `gradient` under `spec`: a sum over devices that was deferred is made in the scope's `reduce` dtype.

    Cast before it is summed, or the sum would be made in the weight's own dtype, which is that of its cotangent.
    """
    scope = current()
    deferred = current_explicit() and jax.typeof(gradient).sharding.spec.unreduced
    dtype = scope.reduce if scope and deferred else gradient.dtype
    return reshard(gradient.astype(dtype), spec).astype(gradient.dtype)


def like_operand(gradient: Array, operand: Any) -> Array:
    """The gradient for an operand, of which other devices may have a part, as the operand (or its type) lies."""
    if current_explicit():
        gradient = reshard(gradient, operand.sharding.spec)
    return gradient.astype(operand.dtype)


def scaled(gradient: Array, factor: Array) -> Array:
    """`gradient`, perhaps a partial sum, times a scalar.

    JAX multiplies a partial sum only by what is marked as the same on all devices that have a part.
    """
    if current_explicit():
        unreduced = jax.typeof(gradient).sharding.spec.unreduced
        factor = reshard(factor, PartitionSpec(reduced=unreduced)) if unreduced else factor
    return (gradient * factor).astype(gradient.dtype)


def refuse_gradient(x: Array, why: str) -> Array:
    """`x`, whose gradient nobody makes: asking for it raises `UserError(why)`. It would be zero without a word."""

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, cotangent):
        if not isinstance(cotangent, SymbolicZero):
            raise UserError(why)
        return (None,)

    same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return same(x)
