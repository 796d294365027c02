"""The one door through which a weight is used, whatever is done with it.

A weight is stored under the `params` rows of the layout and in its own dtype, and used elsewhere, in the compute dtype.
The move there is ZeRO-3's all-gather; that of its gradient back is the reduce-scatter.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from axon.axes.gradients import like_operand, of_type
from axon.axes.memory import is_on_host, to_device
from axon.axes.memory_order import row_major
from axon.axes.patterns import Contraction, Names, PatternError
from axon.axes.placing import current_explicit, reshard
from axon.axes.scope import Scope, current
from axon.axes.specs import entries, extra_axes


class Weight(Protocol):
    """An operand that knows its own axes: a parameter."""

    axes: Names

    def get_value(self) -> Array: ...


@runtime_checkable
class CompositeWeight(Protocol):
    """A weight that is more than an array: LoRA's pair, quantised values and their scales, experts' matrices.

    It stands for an array with these `axes`, and `einsum` leaves the contraction to it: `x·W + (x·A)·B`, written with
    `einsum` on its own arrays, or `use_weight` with an `Operation` of its own.
    """

    @property
    def axes(self) -> Names: ...

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """`x`, whose axes are `contraction.left`, contracted with this weight to `contraction.out`."""
        ...


def is_weight(operand: Any) -> TypeGuard[Weight | CompositeWeight]:
    """Whether an operand is a weight. (`isinstance` with a protocol does not see an NNX variable's metadata.)"""
    return hasattr(operand, "axes")


def stored_array(weight: Weight | CompositeWeight, user: str) -> Any:
    """The array, `HostWeight` or `LayerWeight` that a weight is.

    Raises `PatternError`, in the name of `user`, for a weight that is more than that.
    """
    if isinstance(weight, CompositeWeight):
        raise PatternError(
            f"{user} is given a {type(weight).__name__}, a weight that brings its own contraction: only einsum can use "
            "one. Give the parameter itself"
        )
    return weight.get_value()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostWeight:
    """A weight whose value is in the host's memory, where a gradient is wanted on the device.

    JAX gives a gradient the type of what it is for, and so its memory. This one is `place`'s: zeros on the device with
    the weight's shape, which nothing reads.
    """

    value: Array
    place: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim


def differentiated(stored: Array) -> Array:
    """The array whose gradient is a parameter's: itself, or zeros in its place if it is in the host's memory."""
    if not is_on_host(stored):
        return stored
    zeros = jnp.zeros(stored.shape, stored.dtype)
    return reshard(zeros, jax.typeof(stored).sharding.spec) if current_explicit() else zeros


def with_place(stored: Array, place: Array) -> "Array | HostWeight":
    """A parameter as a module takes it, with `place`, of which gradients are asked, as `differentiated` gives it."""
    return HostWeight(stored, place) if is_on_host(stored) else place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeight:
    """One layer's weight in the stack of all layers' weights, where nothing is trained.

    An operation may read it there (`StoredWeight.in_stack`); for any other it is cut out.
    """

    stack: Array
    layer: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    def cut_out(self) -> Array:
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


Stored = Array | HostWeight | LayerWeight
"""What a weight's value may be."""


def frozen_array(weight: Stored) -> Array:
    """A weight that does not train, on the device."""
    if isinstance(weight, LayerWeight):
        return weight.cut_out()
    return to_device(weight.value if isinstance(weight, HostWeight) else weight)


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored, while an operation uses it. `trained` says whether a gradient for it is wanted, and
    `type` is that of this gradient's primal."""

    scope: Scope
    value: Array | LayerWeight
    trained: bool = False
    type: Any = None

    def gathered(self, spec: PartitionSpec) -> Array:
        """The weight under `spec` in the compute dtype."""
        return self.moved(spec).astype(self.scope.compute)

    def moved(self, spec: PartitionSpec) -> Array:
        """The weight under `spec` in its own dtype where that is narrower than the compute dtype, else in this.

        One in the host's memory is brought to the device first, each device's own shard.
        """
        compute = jnp.dtype(self.scope.compute)
        value = self.stored()
        narrow = value.dtype.itemsize < compute.itemsize
        return reshard(value if narrow else value.astype(compute), spec)

    def stored(self) -> Array:
        """The weight as it is stored, on the device."""
        value = self.value.cut_out() if isinstance(self.value, LayerWeight) else self.value
        return row_major(to_device(value)) if is_on_host(value) else value

    def in_stack(self, spec: PartitionSpec) -> LayerWeight | None:
        """The weight in its stack, if it has one, and lies there under `spec` already."""
        weight = self.value
        if not isinstance(weight, LayerWeight) or is_on_host(weight.stack) or not current_explicit():
            return None
        stored = jax.typeof(weight.stack).sharding.spec
        here, wanted = (tuple(map(entries, one)) for one in (stored, (None, *spec)))
        return weight if here == wanted else None

    def cotangent(self, gradient: Array) -> Array:
        """A gradient, of which other devices may have a part, as the weight is stored: see `as_cotangent`."""
        return of_type(gradient, self.type)

    def swapped_cotangent(self, gradient: Array) -> Array:
        """`cotangent` of a gradient whose last two dimensions are swapped: it is summed over devices as it is.

        A reduce-scatter by the last dimension would first copy it, to have each device's part in one piece.
        """
        if current_explicit():
            spec = self.type.sharding.spec
            *first, a, b = spec.partitions
            gradient = reshard(gradient, PartitionSpec(*first, b, a, unreduced=spec.reduced))
        return jnp.swapaxes(gradient, -1, -2)

    def splits_last_beyond(self, spec: PartitionSpec) -> bool:
        """Whether a device stores a part of the last dimension of what `spec` gives it there."""
        stored = jax.typeof(self.value).sharding.spec
        return bool(extra_axes(spec[-1], stored.partitions[-1] if len(stored.partitions) == len(spec) else None))


class Operation(ABC):
    """Something that is done with a weight and other operands, and its gradients.

    Gradients may be partial sums, of which other devices have a part; that for the weight is to be accumulated in
    `scope.reduce`.
    """

    def result(self, weight: StoredWeight, *operands: Array) -> Any:
        """The result where nothing is differentiated."""
        return self.forward(weight, *operands)[0]

    @abstractmethod
    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Any, Any]:
        """The result, and what `backward` needs besides the stored weight."""

    @abstractmethod
    def backward(self, weight: StoredWeight, saved: Any, cotangent: Any) -> tuple[Array | None, ...]:
        """The gradients for the weight, if it is trained, and for each operand; None for an operand that has none.

        In `cotangent` a part of the result that nothing depends on is None.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """What is kept from the forward for the backward."""

    weight: Array
    saved: Any
    trained: bool = field(metadata={"static": True})


def use_weight(scope: Scope, operation: Operation, weight: Stored, *operands: Array) -> Any:
    """`operation` with a stored weight and other operands, differentiable for all of them.

    - What is kept for the backward is the stored weight, and what the operation asks for, whatever the remat policy:
      the gathered copy never is, but gathered again.
    - The weight's gradient is summed over devices in the dtype that the operation made it in, and where its type says:
      see `as_cotangent`. A weight that is not trained has none made.

    The functions that JAX is given are closures made in each call: it caches traces by a function's identity, and one
    that outlived the scope in force would give another layout's program.
    """
    if isinstance(weight, LayerWeight):
        return operation.result(StoredWeight(scope, weight), *operands)
    types = [jax.typeof(x) for x in operands]
    value, *place = (weight.value, weight.place) if isinstance(weight, HostWeight) else (weight,)
    trained_type = jax.typeof((value, *place)[-1])

    @jax.custom_vjp
    def use(weight, *operands):
        return operation.result(StoredWeight(scope, weight[0]), *operands)

    def forward(weight, *operands):
        value, trained = weight[0].value, weight[-1].perturbed
        stored = StoredWeight(scope, value, trained, trained_type)
        result, saved = operation.forward(stored, *(x.value for x in operands))
        return result, _Residuals(value, saved, trained)

    def backward(residuals, cotangent):
        stored = StoredWeight(scope, residuals.weight, residuals.trained, trained_type)
        cotangent = jax.tree.map(lambda ct: None if isinstance(ct, SymbolicZero) else ct, cotangent)
        dw, *gradients = operation.backward(stored, residuals.saved, cotangent)
        placed = [None if dx is None else like_operand(dx, of) for dx, of in zip(gradients, types, strict=True)]
        return (*(None for _ in place), None if dw is None else stored.cotangent(dw)), *placed

    use.defvjp(forward, backward, symbolic_zeros=True)
    return use((value, *place), *operands)


def gathered(weight: Weight) -> Array:
    """A parameter's array as activations with its axes lie, in the compute dtype; a gradient reaches the parameter."""
    value, scope = stored_array(weight, "gathered"), current()
    if scope is None:
        return value
    return use_weight(scope, _Gather(scope.placement.spec(weight.axes)), value)


@dataclass(frozen=True)
class _Gather(Operation):
    """The weight itself under `spec`."""

    spec: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, None]:
        return weight.gathered(self.spec), None

    def backward(self, weight: StoredWeight, saved: None, cotangent: Array) -> tuple[Array | None]:
        return (cotangent if weight.trained else None,)
