"""Parameters and variables: one declaration gives axes, shape, dtype, initial values and sharding."""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names, PatternError, base, parse_names
from axon.axes.statistics import MAX, SUM, Reduction
from axon.errors import UserError, suggest
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
            sums over; the others are outputs. decay: whether weight decay pulls at it. trained: whether it changes.
    """

    stack: int = 0
    inputs: Names = ()
    decay: bool = False
    trained: bool = True

    @property
    def own(self) -> Names:
        """The axes without the stacked ones."""
        return self.axes[self.stack :]


class Param(nnx.Param):
    """A parameter: named axes, sizes from `dims`, initial values from `init`.

    `decay` says whether weight decay pulls at it: matrices, unless they are biases that happen to have two axes.
    `in_stack`: over a cache its value is an `axon.axes.LayerWeight`, for an operation that reads one layer's in the
    stack of all. A transform (`axon.nn.weight_transform`) says whether it is `trained`, and under which path its
    initial values are drawn (`drawn_as`), where that is not its own.

    Until `initialise` makes it, it holds only its specification, a `jax.ShapeDtypeStruct`. Stacked along a depth of
    `num_layers`, the array has the leading axes `stack` besides its own, and `layers` are the logical numbers of the
    layers there. It may have more: what comes after `layers` is padding, of zeros at first
    (`axon.nn.stored_layers.pad_layers`).
    """

    axes: Names
    stack: Names
    layers: tuple[int, ...]
    num_layers: int
    init: Initializer
    decay: bool
    in_stack: bool
    trained: bool
    drawn_as: str | None

    def __init__(
        self,
        axes: str,
        dims: Dims,
        init: Initializer | None = None,
        *,
        decay: bool | None = None,
        dtype: Any = jnp.float32,
        in_stack: bool = False,
        trained: bool = True,
    ):
        names = parse_names(axes)
        spec = _abstract("Param", axes, names, dims, dtype)
        init = fan_in(names[0]) if init is None else init
        decay = len(names) > 1 if decay is None else decay
        own = {"init": init, "decay": decay, "in_stack": in_stack, "trained": trained, "drawn_as": None}
        super().__init__(spec, axes=names, stack=(), layers=(), num_layers=0, **own)


Updated = Callable[[Array, Array], Array]
"""(value, statistic of the global batch) → the value after a step; of all layers at once."""


@dataclass(frozen=True)
class VariableSpec(ArraySpec):
    """A variable before it exists: see `Variable`. `stack`: how many of its axes come first and count copies."""

    update: Updated = field(kw_only=True)
    reduction: Reduction = field(kw_only=True)
    reported: tuple[int, ...] | None = field(kw_only=True)
    stack: int = field(kw_only=True)


class Variable(nnx.Variable):
    """State of a module that a step updates without a gradient: a router's bias, the range of an FP8 operand.

    Declared as a `Param` is. After a step it becomes `update(value, statistic)`; it stays where there was none. The
    statistic is what the module gave under its path in `Auxiliary.statistics`, reduced over the global batch: a sum, or
    with `reduction=MAX` a maximum of values that are not negative. Or, where its shape is `reported`, operations report
    it in the backward (`axon.axes.reporting_einsum`), and it is a maximum.
    """

    axes: Names
    stack: Names
    layers: tuple[int, ...]
    init: Initializer
    update: Updated
    reduction: Reduction
    reported: tuple[int, ...] | None

    def __init__(
        self,
        axes: str,
        dims: Dims,
        update: Updated,
        init: Initializer | None = None,
        *,
        dtype: Any = jnp.float32,
        reduction: Reduction = SUM,
        reported: tuple[int, ...] | None = None,
    ):
        names = parse_names(axes)
        spec = _abstract("Variable", axes, names, dims, dtype)
        own = {"update": update, "reduction": MAX if reported is not None else reduction, "reported": reported}
        super().__init__(spec, axes=names, stack=(), layers=(), init=init or constant(0.0), **own)


def _abstract(kind: str, axes: str, names: Names, dims: Dims, dtype: Any) -> jax.ShapeDtypeStruct:
    for name in names:
        if base(name) not in dims:
            raise PatternError(f"{kind}({axes!r}): no size for axis {name!r}.{suggest(base(name), dims)}")
    return jax.ShapeDtypeStruct(tuple(dims[base(n)] for n in names), dtype)


@dataclass(frozen=True)
class normal:
    """Gaussian with a given standard deviation."""

    stddev: float

    def __call__(self, key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
        return self.stddev * _gaussian(key, shape)


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


@dataclass(frozen=True)
class constant:
    """The same value everywhere."""

    value: float

    def __call__(self, key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
        return jnp.full(shape, self.value, jnp.float32)


def store_in(model: nnx.Module, dtype: Any) -> None:
    """Declare that parameters are stored in `dtype`, those that are declared as float32."""
    for _, param in _declared(model, Param):
        value = param.get_value()
        if value.dtype == jnp.float32:
            param.set_value(jax.ShapeDtypeStruct(value.shape, jnp.dtype(dtype)))


def parameters(model: nnx.Module) -> dict[str, ParamSpec]:
    """Path → specification of every parameter, stacked axes included, in a fixed order."""
    return {path: _param_spec(param) for path, param in _declared(model, Param)}


def variables(model: nnx.Module) -> dict[str, VariableSpec]:
    """Path → specification of every `Variable`, in a fixed order."""
    return {path: _variable_spec(variable) for path, variable in _declared(model, Variable)}


def _variable_spec(variable: Variable) -> VariableSpec:
    value = variable.get_value()
    return VariableSpec(
        variable.stack + variable.axes,
        tuple(value.shape),
        value.dtype,
        unpadded=_unpadded(variable),
        update=variable.update,
        reduction=variable.reduction,
        reported=variable.reported,
        stack=len(variable.stack),
    )


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
        param.trained,
        unpadded=_unpadded(param),
    )


def _unpadded(param: Param | Variable) -> tuple[int, ...] | None:
    """A parameter's shape without padding, if it has any."""
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
    found = [
        {
            path: _drawn(_drawn_as(path, v), v, placement.sharding(v.stack + v.axes, rows))
            for path, v in _declared(model, kind)
            if wanted(path)
        }
        for kind, rows in kinds.items()
    ]
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        arrays = iter(_program(tuple(one for drawn in found for one in drawn.values()))(np.int64(seed)))
    return [
        nnx.traversals.unflatten_mapping({tuple(path.split("/")): next(arrays) for path in drawn}) for drawn in found
    ]


def _drawn_as(path: str, param: Param | Variable) -> str:
    return param.drawn_as or path if isinstance(param, Param) else path


@dataclass(frozen=True)
class _Drawn:
    """An array to be made. Stacked, it has the logical number of each layer, of which the first `real` are the
    model's and the others padding."""

    path: str
    axes: Names
    shape: tuple[int, ...]
    dtype: Any
    init: Initializer
    sharding: NamedSharding
    layers: tuple[int, ...] | None = None
    real: int = 0

    def __call__(self, keys: Array) -> Array:
        """The array of its key, or of its layers' keys."""
        if self.layers is None:
            return self.init(keys, self.axes, self.shape).astype(self.dtype)
        values = jax.vmap(lambda key: self.init(key, self.axes, self.shape))(keys).astype(self.dtype)
        return with_zero_padding(values, self.real)


def _drawn(path: str, param: Param | Variable, sharding: NamedSharding) -> _Drawn:
    value, real = param.get_value(), len(param.layers)
    try:
        hash(param.init)
    except TypeError as error:
        raise UserError(
            f"{path}: its init, a {type(param.init).__name__}, has no hash: expected a function, or a frozen dataclass"
        ) from error
    if not param.stack:
        return _Drawn(path, param.axes, value.shape, value.dtype, param.init, sharding)
    layers = (*param.layers, *(0,) * (value.shape[0] - real))
    return _Drawn(path, param.axes, value.shape[len(param.stack) :], value.dtype, param.init, sharding, layers, real)


@lru_cache(maxsize=16)
def _program(drawn: tuple[_Drawn, ...]) -> Callable[[Any], tuple[Array, ...]]:
    """seed → the arrays. One program for all seeds, and for all modules that declare the same."""

    def make(seed: Array) -> tuple[Array, ...]:
        return tuple(one(keys) for one, keys in zip(drawn, _keys(jax.random.key(seed), drawn), strict=True))

    return jax.jit(make, out_shardings=tuple(one.sharding for one in drawn))


def _keys(key: Array, drawn: Sequence[_Drawn]) -> Iterator[Array]:
    """The key of each, or those of its layers. Folded all at once: a hash takes as long to compile as all of them."""
    hashes = np.asarray([zlib.crc32(one.path.encode()) for one in drawn], np.uint32)
    layers = [one.layers or () for one in drawn]
    whose = np.repeat(np.arange(len(drawn)), [len(of_one) for of_one in layers])
    of_path = jax.vmap(jax.random.fold_in, (None, 0))(key, hashes)
    of_layer = jax.vmap(jax.random.fold_in)(of_path[whose], np.asarray([*chain.from_iterable(layers)], np.int32))
    for index, one in enumerate(drawn):
        yield of_path[index] if one.layers is None else of_layer[whose == index]


def padded(value: Array, spec: ArraySpec) -> Array:
    """A parameter as it is stored, zeros at the end of its layers."""
    missing = [(0, size - have) for size, have in zip(spec.shape, value.shape, strict=True)]
    return jnp.pad(value, missing) if spec.shape != value.shape else value


def with_zero_padding(values: Array, layers: int) -> Array:
    """A stack of which the first `layers` are of the model, and the others 0."""
    if values.shape[0] == layers:
        return values
    is_real = (jnp.arange(values.shape[0]) < layers).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.where(is_real, values, jnp.zeros((), values.dtype))
