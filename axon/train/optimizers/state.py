"""An optimizer's state in axes."""

from collections.abc import Sequence
from typing import Any

import jax

from axon.axes import ArraySpec, Names
from axon.nn import ParamSpec
from axon.train.optimizers.base import Optimizer
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.matrix import axes_of_part


def state_specs(optimizer: Optimizer, parameters: Parameters) -> Any:
    """An optimizer's state in axes: a tree like that of its transformation, whose leaves are `ArraySpec`s.

    A leaf under a parameter's path has the parameter's axes if it has its shape, perhaps with dimensions of 1 (a
    factored moment), with further dimensions at the end, or without some dimensions. All others are unnamed (`_0`, …),
    and replicated.
    """
    values = {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in parameters.items()}
    state = jax.eval_shape(optimizer.transform(parameters).init, values)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(path, leaf, parameters), state)


def owner(path: Sequence[Any], parameters: Parameters) -> str | None:
    """The parameter that a leaf of the state is of, by its key path in the tree; None for what all parameters share."""
    return next((key.key for key in path if getattr(key, "key", None) in parameters), None)


def _spec(path: Sequence[Any], leaf: Any, parameters: Parameters) -> ArraySpec:
    of = owner(path, parameters)
    axes = None if of is None else _axes(parameters[of], leaf.shape)
    unnamed = tuple(f"_{i}" for i in range(len(leaf.shape)))
    return ArraySpec(unnamed if axes is None else axes, tuple(leaf.shape), leaf.dtype, "optimizer")


def _axes(spec: ParamSpec, shape: Sequence[int]) -> Names | None:
    """The axes of an array of this shape in the parameter's state; None where they cannot be inferred."""
    part = axes_of_part(spec.axes, spec.shape, shape)
    return _in_order(spec, shape) if part is None else part


def _in_order(spec: ParamSpec, shape: Sequence[int]) -> Names | None:
    """The axes of `spec` whose sizes are `shape`, in order; None if there are none."""
    left = list(zip(spec.axes, spec.shape, strict=True))
    axes = []
    for size in shape:
        while left and left[0][1] != size:
            left.pop(0)
        if not left:
            return None
        axes.append(left.pop(0)[0])
    return tuple(axes)
