"""Named axes: patterns, and the two functions through which every array is placed, `einsum` and `shard`.

Arrays are plain `jax.Array`s. Names live in patterns ("batch seq embed, embed mlp -> batch seq mlp") and in the
declarations of parameters; what a name means on the device mesh is said by the placement in force (`axon.layout`).

`name.role` is the same dimension with a row of its own in the layout's table; it falls back to the row of `name`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import ring
from axon.contraction import aligned, contract
from axon.gather import gather_in_stages
from axon.patterns import Contraction, Names, PatternError, bare, parse_einsum, parse_names
from axon.scatter import scatter_sum
from axon.specs import entries, less, partial_spec, split, split_by, spread


class Weight(Protocol):
    """An operand that knows its own axes: a parameter."""

    axes: Names

    def get_value(self) -> Array: ...


def is_weight(operand: Any) -> TypeGuard[Weight]:
    """Whether an operand is a parameter. (`isinstance` with a protocol does not see an NNX variable's metadata.)"""
    return hasattr(operand, "axes")


class Placement(Protocol):
    """What the names of a pattern mean on a mesh. `axon.layout.Placement` is the one there is."""

    @property
    def explicit(self) -> bool: ...
    @property
    def platform(self) -> str: ...
    @property
    def chip(self) -> str: ...
    @property
    def line(self) -> int: ...
    def mesh_axes(self, name: str, kind: str = "activations") -> Names: ...
    def spec(self, names: Names, kind: str = "activations") -> PartitionSpec: ...
    @property
    def overlap(self) -> Names: ...


@dataclass(frozen=True)
class Scope:
    """What `einsum` and `shard` obey while a function is traced: where, and in which precision.

    `compute` is the dtype of a contraction's operands, and so of a weight's gather; `reduce` that of a weight's
    gradient, and so of its reduction over devices; `kernels` names, by operation, the implementations that a person
    asked for; `notices` collects what was chosen while tracing, and `rings` the mesh axes over which `einsum` made a
    ring of a collective.

    A scope outlives no trace: JAX caches traces by function identity, so functions handed to its transformations
    are closures made inside one.
    """

    placement: Placement
    compute: Any = jnp.float32
    reduce: Any = jnp.float32
    kernels: Mapping[str, str] = field(default_factory=dict)
    notices: dict[str, str] = field(default_factory=dict)
    rings: set[str] = field(default_factory=set)


_scope: ContextVar[Scope | None] = ContextVar("axon.axes.scope", default=None)


def current() -> Scope | None:
    """The scope in force, or None: then patterns are mathematics only, and arrays stay where they are."""
    return _scope.get()


@contextmanager
def activate(scope: Scope) -> Iterator[Scope]:
    """Put `scope` in force inside the `with` block."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def notice(topic: str, text: str) -> None:
    """Leave word of a choice made while tracing (which kernel, which policy); who traces prints it, once."""
    scope = current()
    if scope is not None:
        scope.notices[topic] = text


# ---- where an array lives ---------------------------------------------------------------------------------------


def shard(x: Array, pattern: str, kind: str = "activations") -> Array:
    """`x`, with each axis where the layout in force puts its name; `x` itself where no layout is in force."""
    names = parse_names(pattern)
    _check_rank(x, names, pattern)
    scope = current()
    return move(x, scope.placement.spec(names, kind)) if scope else x


def move(x: Array, spec: PartitionSpec) -> Array:
    """`x` under `spec`: a `reshard` on Explicit mesh axes, a constraint on Auto ones, nothing on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or len(mesh.manual_axes) == len(mesh.axis_names):
        return x
    if not current_explicit():
        return lax.with_sharding_constraint(x, spec)
    scope = current()
    if scope and scope.placement.platform == "tpu" and jax.typeof(x).sharding.spec.unreduced:
        x = scatter_sum(x, spec)
    x = gather_in_stages(x, spec, scope.placement.line) if scope else x
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def current_explicit() -> bool:
    """Whether shardings are part of array types here (`AxisType.Explicit`)."""
    scope = current()
    return scope is not None and scope.placement.explicit


def can_owe_sums() -> bool:
    """Whether a type can say that a sum over devices is still owed: on Explicit mesh axes, outside manual regions.

    XLA refuses partial sums over one mesh axis where another is manual (jax 0.12 with its own compilers).
    """
    return current_explicit() and not jax.sharding.get_abstract_mesh().manual_axes


def _check_rank(x: Array, names: Names, pattern: str) -> None:
    if x.ndim != len(names):
        raise PatternError(f"pattern {pattern!r} names {len(names)} axes, but the array has shape {x.shape}")


def as_cotangent(gradient: Array, weight: Array) -> Array:
    """`gradient` summed over devices as far as the type of `weight` asks.

    A weight that is *reduced* over a mesh axis receives a gradient that is *unreduced* over it, so that the sum over
    devices happens once, after the last microbatch. Where the weight is sharded and the gradient is partial, the
    move is a reduce-scatter: the transpose of the gather.
    """
    if not current_explicit():
        return gradient.astype(weight.dtype)
    kept = jax.typeof(weight).sharding.spec
    return move(gradient, PartitionSpec(*kept.partitions, unreduced=kept.reduced)).astype(weight.dtype)


def scaled(gradient: Array, factor: Array) -> Array:
    """`gradient`, perhaps a partial sum, times a scalar."""
    if current_explicit():
        owed = jax.typeof(gradient).sharding.spec.unreduced
        factor = move(factor, PartitionSpec(reduced=owed)) if owed else factor
    return (gradient * factor).astype(gradient.dtype)


def per_device(fn: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
    """`fn` run by each device on its own shards, all mesh axes manual; just `fn` where there is one device.

    `inputs` and `outputs` are trees of `PartitionSpec`s like the arguments and the results.

    An output whose spec was made by `partial_spec` is summed over devices: later, by whoever needs the sum, where
    `can_owe_sums`; at once elsewhere.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn
    if can_owe_sums():
        return jax.shard_map(fn, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)

    def summed(*shards):
        return jax.tree.map(
            lambda spec, v: lax.psum(v, tuple(spec.unreduced)) if spec.unreduced else v, outputs, fn(*shards)
        )

    plain = jax.tree.map(lambda spec: PartitionSpec(*spec.partitions), outputs)
    return jax.shard_map(summed, in_specs=tuple(inputs), out_specs=plain, check_vma=False)


# ---- einsum -----------------------------------------------------------------------------------------------------


def einsum(pattern: str, x: Array, y: Array | Weight) -> Array:
    """Contract two operands by name, each moved to where the output's names put it.

    Axes kept in the output take the output's mesh axes; contracted axes take the activations' row, less mesh axes
    that the output already uses. The second operand may be a parameter: then only `(x, the stored parameter)` is
    kept for the backward, the gathered copy never is, and its gradient is a partial sum until `as_cotangent`.

    Shapes: as the pattern says. Raises `PatternError` where pattern and operands disagree.
    """
    parsed = parse_einsum(pattern)
    value = _value(parsed, y)
    _check_sizes(parsed, x, value)
    scope = current()
    if scope is None:
        return contract(x, bare(parsed.left), value, bare(parsed.right), bare(parsed.out))
    if is_weight(y):
        return _weighted(parsed, scope, x, value)
    left, right, out = _specs(parsed, scope.placement)
    a, b = move(x.astype(scope.compute), left), move(value.astype(scope.compute), right)
    result = _placed(scope, a, parsed.left, b, parsed.right, parsed.out, out)
    return move(result, scope.placement.spec(parsed.out))


def add(pattern: str, x: Array, bias: Weight) -> Array:
    """`x` plus a parameter with some of its axes: `add("batch seq mlp, mlp -> batch seq mlp", x, self.bias)`."""
    parsed = parse_einsum(pattern)
    value = _value(parsed, bias)
    _check_sizes(parsed, x, value)
    scope = current()
    names, target = bare(parsed.right), bare(parsed.left)
    if scope is None:
        return x + aligned(value, names, target)
    left, right, out = _specs(parsed, scope.placement)
    came = jax.typeof(x).sharding.spec

    @jax.custom_vjp
    def apply(x, w):
        return move(x, out) + aligned(move(w.astype(x.dtype), right), names, target)

    def backward(w, dy):
        ones = jnp.ones((), scope.reduce)
        spec = _partial(parsed, left, right)
        dw = _placed(scope, dy, parsed.left, ones, (), parsed.right, spec, scope.reduce)
        return move(dy, came) if current_explicit() else dy, as_cotangent(dw, w)

    apply.defvjp(lambda x, w: (apply(x, w), w), backward)
    return apply(x, value)


def _weighted(parsed: Contraction, scope: Scope, x: Array, weight: Array) -> Array:
    """A parameter's contraction, differentiated by hand: see `einsum`."""
    left, right, out = _specs(parsed, scope.placement)
    result = scope.placement.spec(parsed.out)

    def operands(x, w):
        a = Operand(x.astype(scope.compute), bare(parsed.left), left)
        return a, Operand(w.astype(scope.compute), bare(parsed.right), right).moved()

    @jax.custom_vjp
    def apply(x, w):
        a, b = operands(x, w)
        return multiply(scope, a, b, bare(parsed.out), out, result)[0]

    def backward(kept, dy):
        x, w = kept
        a, b = operands(x, w)
        d = Operand(dy, bare(parsed.out), out)
        came = jax.typeof(x).sharding.spec if current_explicit() else left
        dx, d = multiply(scope, d, b, bare(parsed.left), left, came)
        spec = _partial(parsed, left, right)
        dw, _ = multiply(scope, a, d.moved(), bare(parsed.right), spec, spec, scope.reduce)
        return dx.astype(x.dtype), as_cotangent(dw, w)

    apply.defvjp(lambda x, w: (apply(x, w), (x, w)), backward)
    return apply(x, weight)


def _specs(parsed: Contraction, placement: Placement) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Where the two operands and the output of a contraction are while it is done, by the rule in `einsum`."""
    work = parsed.work
    out = placement.spec(work.out)
    kept = dict(zip(work.out, out, strict=True))
    used = set(spread(out))

    def of(names: Names) -> PartitionSpec:
        rows = placement.spec(names)
        return PartitionSpec(*(kept.get(n, less(row, used)) for n, row in zip(names, rows, strict=True)))

    return of(work.left), of(work.right), out


@dataclass(frozen=True)
class Operand:
    """An array, its names without roles, and the spec that it is to have while it is worked with."""

    value: Array
    names: Names
    spec: PartitionSpec

    def moved(self) -> "Operand":
        return replace(self, value=move(self.value, self.spec))


def multiply(
    scope: Scope, a: Operand, b: Operand, out: Names, spec: PartitionSpec, to: PartitionSpec, dtype: Any = None
) -> tuple[Array, Operand]:
    """The contraction of `a` and `b`, which is made under `spec`, moved to `to`; and `a` as it was worked with.

    `b` is in place. What `a` still lacks is gathered, and what `to` splits further is reduced and scattered: in a
    ring, with compute in between, over the mesh axes in `scope.placement.overlap`, otherwise before and after.
    """
    product = partial(_contract, scope, a.names, b.names, out, dtype)
    if not current_explicit():
        a = a.moved()
        return move(product(a.value, b.value), to), a
    ways = scope.placement.overlap
    if found := split_by(jax.typeof(a.value).sharding.spec, a.spec, ways):
        dimension, mesh_axes = found
        scope.rings.update(mesh_axes)
        name = a.names[dimension]
        held = jax.typeof(a.value).sharding.spec
        made = partial_spec(PartitionSpec(*spec.partitions), _summed(a.names, a.spec, out))
        run = per_device(
            lambda x, y: ring.gathered(product, x, a.names, y, b.names, out, name, mesh_axes),
            (held, b.spec),
            (made, a.spec),
        )
        result, whole = run(a.value, b.value)
        return move(result, to), replace(a, value=whole)
    a = a.moved()
    owed = _summed(a.names, a.spec, out)
    if (found := split_by(to, spec, ways)) and set(found[1]) <= set(owed) and out[found[0]] in a.names:
        dimension, mesh_axes = found
        scope.rings.update(mesh_axes)
        made = partial_spec(split(spec, dimension, mesh_axes), [m for m in owed if m not in mesh_axes])
        run = per_device(
            lambda x, y: ring.scattered(product, x, a.names, y, out[dimension], mesh_axes), (a.spec, b.spec), made
        )
        return move(run(a.value, b.value), to), a
    told = spec if spec.unreduced or to == spec or not can_owe_sums() else partial_spec(spec, owed)
    return move(product(a.value, b.value, told), to), a


def _contract(scope: Scope, a_names: Names, b_names: Names, out: Names, dtype: Any, a, b, spec=None) -> Array:
    return contract(a, a_names, b, b_names, out, spec, dtype, scope.placement.platform == "cpu")


def _placed(scope: Scope, a, a_names: Names, b, b_names: Names, out: Names, spec, dtype: Any = None) -> Array:
    """`contract`, with the result under `spec`."""
    told = spec if current_explicit() else None
    result = _contract(scope, bare(a_names), bare(b_names), bare(out), dtype, a, b, told)
    return result if current_explicit() else move(result, spec)


def _summed(names: Names, spec: PartitionSpec, out: Names) -> list[str]:
    """The mesh axes that split those of `names` that a contraction sums over."""
    return [a for n, entry in zip(names, spec.partitions, strict=True) if n not in out for a in entries(entry)]


def stored_apart(placement: Placement, name: str, tokens: Names) -> Names:
    """The mesh axes that split `name` in stored parameters, if they are among those that split the tokens (ZeRO-3).

    Work on such a parameter either gathers it, or gathers the tokens and leaves it where it is.
    """
    own = placement.mesh_axes(name, "params")
    return own if set(own) <= set(tokens) else ()


def _partial(parsed: Contraction, left: PartitionSpec, right: PartitionSpec) -> PartitionSpec:
    """`right`, for a sum over the axes of the left operand only, which leaves each device with a part of it."""
    kept = bare(parsed.right)
    summed = [a for n, entry in zip(bare(parsed.left), left, strict=True) if n not in kept for a in entries(entry)]
    return partial_spec(right, summed if can_owe_sums() else ())


def _value(parsed: Contraction, y: Any) -> Array:
    if not is_weight(y):
        return y
    if bare(y.axes) != bare(parsed.right):
        raise PatternError(f"{parsed.text!r}: this parameter's axes are {' '.join(y.axes)!r}")
    return y.get_value()


def _check_sizes(parsed: Contraction, x: Array, y: Array) -> None:
    _check_rank(x, parsed.left, parsed.text)
    _check_rank(y, parsed.right, parsed.text)
    sizes = dict(zip(bare(parsed.left), x.shape, strict=True))
    for name, size in zip(bare(parsed.right), y.shape, strict=True):
        if sizes.setdefault(name, size) != size:
            raise PatternError(f"{name!r} is {sizes[name]} in one operand of {parsed.text!r} and {size} in the other")
