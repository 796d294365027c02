"""An optimizer's state in axes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from axon.axes import ArraySpec, Names
from axon.nn import ParamSpec
from axon.train.optimizers.base import Optimizer
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.matrix import axes_of_part
from axon.train.optimizers.moments import block_of


def state_specs(optimizer: Optimizer, parameters: Parameters) -> Any:
    """An optimizer's state in axes: a tree like that of its transformation, whose leaves are `ArraySpec`s.

    A leaf under a parameter's path has the parameter's axes if it has its shape, perhaps with dimensions of 1 (a
    factored moment), with further dimensions at the end, or without some dimensions; and so have the scales of a
    moment in blocks. All others are unnamed (`_0`, …), and replicated.
    """
    state = logical = _state(optimizer, parameters)
    if any(spec.unpadded for spec in parameters.values()):
        without = {path: replace(s, shape=s.logical_shape, unpadded=None) for path, s in parameters.items()}
        logical = _state(optimizer, without)

    def spec(path: Sequence[Any], leaf: Any, logical: Any) -> ArraySpec:
        return _spec(path, leaf, logical, parameters)

    return jax.tree_util.tree_map_with_path(spec, state, logical)


def _state(optimizer: Optimizer, parameters: Parameters) -> Any:
    values = {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in parameters.items()}
    return jax.eval_shape(optimizer.transform(parameters).init, values)


def owner(path: Sequence[Any], parameters: Parameters) -> str | None:
    """The parameter that a leaf of the state is of, by its key path in the tree; None for what all parameters share."""
    return next((key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in parameters), None)


def _spec(path: Sequence[Any], leaf: Any, logical: Any, parameters: Parameters) -> ArraySpec:
    """The specification of a leaf, which without padded parameters would be `logical`."""
    of = owner(path, parameters)
    axes = None if of is None else _axes(parameters[of], leaf.shape)
    if of is None or axes is None:
        unnamed = tuple(f"_{i}" for i in range(len(leaf.shape)))
        return ArraySpec(unnamed, tuple(leaf.shape), leaf.dtype, "optimizer")
    unpadded = tuple(logical.shape) if _padded_alike(parameters[of], axes, leaf.shape, logical.shape) else None
    return ArraySpec(axes, tuple(leaf.shape), leaf.dtype, "optimizer", unpadded=unpadded)


def _padded_alike(spec: ParamSpec, axes: Names, shape: Sequence[int], logical: Sequence[int]) -> bool:
    """Whether a parameter's state is padded, and along the axes along which the parameter is."""
    of_owner = {n for n, size, real in zip(spec.axes, spec.shape, spec.logical_shape, strict=True) if size != real}
    of_state = {n for n, size, real in zip(axes, shape, logical, strict=True) if size != real}
    return bool(of_state) and of_state <= of_owner


def _axes(spec: ParamSpec, shape: Sequence[int]) -> Names | None:
    """The axes of an array of this shape in the parameter's state; None where they cannot be inferred."""
    part = axes_of_part(spec.axes, spec.shape, shape)
    if part is None and _counts_blocks(spec, shape):
        return spec.axes
    return _in_order(spec, shape) if part is None else part


def _counts_blocks(spec: ParamSpec, shape: Sequence[int]) -> bool:
    """Whether an array of this shape has one number for each block of a moment in 8 bits."""
    block = block_of(spec)
    return tuple(shape) == tuple(size // block.get(d, 1) for d, size in enumerate(spec.shape))


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
