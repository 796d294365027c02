"""Parameters and variables: one declaration gives axes, shape, dtype, initial values and sharding."""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names, PatternError, base, parse_names
from axon.errors import suggest
from axon.layout import Placement

Dims = Mapping[str, int]
"""Sizes of the named axes."""

Initializer = Callable[[Array, Names, tuple[int, ...]], Array]
"""(key, axes, shape) → float32 values."""


@dataclass(frozen=True)
class ParamSpec(ArraySpec):
    """A parameter before it exists.

    Args:
        stack: how many of its axes come first and count copies (`layers`). inputs: its own axes that a contraction
            sums over; the others are outputs. decay: whether weight decay pulls at it.
    """

    stack: int = 0
    inputs: Names = ()
    decay: bool = False

    @property
    def own(self) -> Names:
        """Its axes without the stacked ones."""
        return self.axes[self.stack :]


class Param(nnx.Param):
    """A parameter: named axes, sizes from `dims`, initial values from `init`.

    `decay` says whether weight decay pulls at it: matrices, unless they are biases that happen to have two axes.

    Until `initialise` makes it, it holds only its specification, a `jax.ShapeDtypeStruct`. Stacked along a depth, the
    array has the leading axes `stack` besides its own, and `layers` are the logical numbers of the layers there. It may
    have more: what comes after `layers` is padding, of zeros at first (`axon.nn.stored_layers.pad_layers`).
    """

    axes: Names
    stack: Names
    layers: tuple[int, ...]
    init: Initializer
    decay: bool

    def __init__(
        self,
        axes: str,
        dims: Dims,
        init: Initializer | None = None,
        *,
        decay: bool | None = None,
        dtype: Any = jnp.float32,
    ):
        names = parse_names(axes)
        spec = _abstract("Param", axes, names, dims, dtype)
        init = fan_in(names[0]) if init is None else init
        decay = len(names) > 1 if decay is None else decay
        super().__init__(spec, axes=names, stack=(), layers=(), init=init, decay=decay)


class Variable(nnx.Variable):
    """State of a module that a step updates without a gradient: a router's bias, the range of an FP8 operand.

    Declared as a `Param` is. After a step it becomes `update(value, statistic)`, where `statistic` is what the module
    reported under its path in `Auxiliary.statistics`, summed over the global batch; it stays where nothing was.
    """

    axes: Names
    stack: Names
    layers: tuple[int, ...]
    init: Initializer
    update: Callable[[Array, Array], Array]

    def __init__(
        self,
        axes: str,
        dims: Dims,
        update: Callable[[Array, Array], Array],
        init: Initializer | None = None,
        *,
        dtype: Any = jnp.float32,
    ):
        names = parse_names(axes)
        spec = _abstract("Variable", axes, names, dims, dtype)
        super().__init__(spec, axes=names, stack=(), layers=(), init=init or constant(0.0), update=update)


def _abstract(kind: str, axes: str, names: Names, dims: Dims, dtype: Any) -> jax.ShapeDtypeStruct:
    for name in names:
        if base(name) not in dims:
            raise PatternError(f"{kind}({axes!r}): no size for axis {name!r}.{suggest(base(name), dims)}")
    return jax.ShapeDtypeStruct(tuple(dims[base(n)] for n in names), dtype)


def normal(stddev: float) -> Initializer:
    """Gaussian with a given standard deviation."""
    return lambda key, axes, shape: stddev * _gaussian(key, shape)


@dataclass(frozen=True)
class fan_in:
    """Gaussian of variance scale² / n, n the product of the sizes of the named (summed) axes (LeCun et al., 1998)."""

    names: str
    scale: float = 1.0

    def __call__(self, key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
        summed = parse_names(self.names)
        size = math.prod(s for n, s in zip(axes, shape, strict=True) if n in summed)
        return self.scale * size**-0.5 * _gaussian(key, shape)


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


def parameters(model: nnx.Module) -> dict[str, ParamSpec]:
    """Path → specification of every parameter, stacked axes included, in a fixed order."""
    return {path: _param_spec(param) for path, param in _declared(model, Param)}


def variables(model: nnx.Module) -> dict[str, ArraySpec]:
    """Path → specification of every `Variable`, in a fixed order."""
    return {
        path: ArraySpec(v.stack + v.axes, tuple(v.get_value().shape), v.get_value().dtype, unpadded=_unpadded(v))
        for path, v in _declared(model, Variable)
    }


def variable_updates(model: nnx.Module) -> dict[str, Callable[[Array, Array], Array]]:
    """Path → `update` of every `Variable`."""
    return {path: variable.update for path, variable in _declared(model, Variable)}


def _declared(model: nnx.Module, kind: type[Param] | type[Variable]) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(model, kind)):
        yield "/".join(map(str, path)), variable


def _param_spec(param: Param) -> ParamSpec:
    value = param.get_value()
    inputs = parse_names(param.init.names) if isinstance(param.init, fan_in) else param.axes[:1]
    return ParamSpec(
        param.stack + param.axes,
        tuple(value.shape),
        value.dtype,
        "params",
        len(param.stack),
        inputs,
        param.decay,
        unpadded=_unpadded(param),
    )


def _unpadded(param: Param | Variable) -> tuple[int, ...] | None:
    """Its shape without padding, if it has any."""
    layers, shape = len(param.layers), tuple(param.get_value().shape)
    return (layers, *shape[1:]) if param.stack and shape[0] != layers else None


def initialise(model: nnx.Module, seed: int, placement: Placement) -> tuple[dict[str, Any], dict[str, Any]]:
    """The initial parameters and variables as nested dicts, made sharded, in one jit.

    A parameter's key is the seed folded with a hash of its path and with its logical layer, so that the values are
    the same bits on every mesh, for any kind of sharding, and for stacked and unstacked layers.
    """
    values, variables = _initialise(model, seed, placement, {Param: "params", Variable: "activations"})
    return values, variables


def initialise_variables(model: nnx.Module, seed: int, placement: Placement) -> dict[str, Any]:
    """The initial variables alone, as `initialise` makes them."""
    return _initialise(model, seed, placement, {Variable: "activations"})[0]


def initialise_parameters(model: nnx.Module, seed: int, placement: Placement, paths: Collection[str]) -> dict[str, Any]:
    """The initial values of some parameters, as `initialise` makes them."""
    return _initialise(model, seed, placement, {Param: "params"}, lambda path: path in paths)[0]


def _initialise(
    model: nnx.Module,
    seed: int,
    placement: Placement,
    kinds: Mapping[Any, str],
    wanted: Callable[[str], bool] = lambda path: True,
) -> list[dict[str, Any]]:
    """Of each kind the arrays with the paths `wanted`, with the layout's rows for the kind of array that it is."""
    states = [
        (kind, [(path, v) for path, v in nnx.to_flat_state(nnx.state(model, kind)) if wanted("/".join(_text(path)))])
        for kind in kinds
    ]
    shardings = tuple(
        {_text(path): placement.sharding(v.stack + v.axes, kinds[kind]) for path, v in state} for kind, state in states
    )

    def make():
        return tuple({_text(path): _values(jax.random.key(seed), path, v) for path, v in state} for _, state in states)

    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        return [nnx.traversals.unflatten_mapping(made) for made in jax.jit(make, out_shardings=shardings)()]


def _text(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, path))


def _values(key: Array, path: tuple[Any, ...], param: Param | Variable) -> Array:
    key = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
    shape = param.get_value().shape
    own, dtype = shape[len(param.stack) :], param.get_value().dtype
    if not param.stack:
        return param.init(key, param.axes, own).astype(dtype)
    layers = (*param.layers, *(0,) * (shape[0] - len(param.layers)))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.asarray(layers))
    values = jax.vmap(lambda k: param.init(k, param.axes, own))(keys).astype(dtype)
    return with_zero_padding(values, len(param.layers))


def with_zero_padding(values: Array, layers: int) -> Array:
    """A stack of which the first `layers` are of the model, and the others 0."""
    if values.shape[0] == layers:
        return values
    is_real = (jnp.arange(values.shape[0]) < layers).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.where(is_real, values, jnp.zeros((), values.dtype))
