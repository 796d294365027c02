"""Parameters: one declaration gives the axes, the shape, the initial values and the sharding."""

import math
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from axon.axes.patterns import Names, PatternError, base, parse_names
from axon.errors import suggest
from axon.layout import ArraySpec, Placement

Dims = Mapping[str, int]
"""Sizes of the named axes."""

Initializer = Callable[[Array, Names, tuple[int, ...]], Array]
"""(key, axes, shape) → float32 values."""


class Param(nnx.Param):
    """A parameter: named axes, sizes from `dims`, initial values from `init`.

    `decay` says whether weight decay pulls at it: matrices, unless they are biases that happen to have two axes.

    Until `initialise` makes it, it holds only its specification, a `jax.ShapeDtypeStruct`. Inside a `Stack` the
    array has the leading axes `stack` besides its own.
    """

    axes: Names
    stack: Names
    init: Initializer
    decay: bool

    def __init__(self, axes: str, dims: Dims, init: Initializer | None = None, *, decay: bool | None = None):
        names = parse_names(axes)
        for name in names:
            if base(name) not in dims:
                raise PatternError(f"Param({axes!r}): no size for axis {name!r}.{suggest(base(name), dims)}")
        shape = tuple(dims[base(n)] for n in names)
        spec = jax.ShapeDtypeStruct(shape, jnp.float32)
        init = fan_in(names[0]) if init is None else init
        super().__init__(spec, axes=names, stack=(), init=init, decay=len(names) > 1 if decay is None else decay)


def normal(stddev: float) -> Initializer:
    """Gaussian with a given standard deviation."""
    return lambda key, axes, shape: stddev * _gaussian(key, shape)


def fan_in(names: str, scale: float = 1.0) -> Initializer:
    """Gaussian of variance scale² / n, n the product of the sizes of the named (summed) axes (LeCun et al., 1998)."""
    summed = parse_names(names)

    def init(key, axes, shape):
        size = math.prod(s for n, s in zip(axes, shape, strict=True) if n in summed)
        return scale * size**-0.5 * _gaussian(key, shape)

    return init


def _gaussian(key: Array, shape: tuple[int, ...]) -> Array:
    """Draws from 65,536 equally likely quantiles of the standard Gaussian.

    Looked up, because arithmetic is not reproducible: the last bits of an inverse error function differ with how its
    loop was cut into vectors, and so with the shape of a shard (seen with jax 0.10.2 on CPU).
    """
    return jnp.asarray(_quantiles())[jax.random.bits(key, shape, jnp.uint16)]


@lru_cache(maxsize=1)
def _quantiles() -> np.ndarray:
    ranks = (np.arange(2**16) + 0.5) / 2**16
    inverse = NormalDist().inv_cdf
    return np.asarray([inverse(rank) for rank in ranks], np.float32)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda key, axes, shape: jnp.full(shape, value, jnp.float32)


def parameters(model: nnx.Module) -> dict[str, ArraySpec]:
    """Path → axes and shape of every parameter, stacked axes included, in a fixed order."""
    flat = nnx.to_flat_state(nnx.state(model, Param))
    return {"/".join(map(str, path)): ArraySpec(p.stack + p.axes, tuple(p.get_value().shape)) for path, p in flat}


def initialise(model: nnx.Module, seed: int, placement: Placement, kind: str = "params") -> dict[str, Any]:
    """The initial parameters as nested dicts, made sharded, in one jit.

    A parameter's key is the seed folded with a hash of its path and with its logical layer, so that the values are
    the same bits on every mesh, for any kind of sharding, and for stacked and unstacked layers.
    """
    state = nnx.state(model, Param)
    shardings = {path: placement.sharding(p.stack + p.axes, kind) for path, p in nnx.to_flat_state(state)}

    def make():
        return {path: _values(jax.random.key(seed), path, p) for path, p in nnx.to_flat_state(state)}

    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        return nnx.traversals.unflatten_mapping(jax.jit(make, out_shardings=shardings)())


def _values(key: Array, path: tuple[Any, ...], param: Param) -> Array:
    key = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
    shape = param.get_value().shape
    own = shape[len(param.stack) :]
    if not param.stack:
        return param.init(key, param.axes, own)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[0]))
    return jax.vmap(lambda k: param.init(k, param.axes, own))(keys)
