"""`einsum` and `add`: contraction and sum by name, each operand moved to where the output's names put it."""

from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes.contraction import broadcast_to_axes, contract
from axon.axes.patterns import Contraction, Names, PatternError, parse_einsum, strip_roles
from axon.axes.placing import as_cotangent, check_rank, current_explicit, reshard, supports_unreduced
from axon.axes.scope import Placement, Scope, current
from axon.axes.sharded_contraction import Operand, _placed, sharded_contract
from axon.axes.specs import entries, mesh_axes_of, partial_spec, without


class Weight(Protocol):
    """An operand that knows its own axes: a parameter."""

    axes: Names

    def get_value(self) -> Array: ...


def is_weight(operand: Any) -> TypeGuard[Weight]:
    """Whether an operand is a parameter. (`isinstance` with a protocol does not see an NNX variable's metadata.)"""
    return hasattr(operand, "axes")


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
        return contract(x, strip_roles(parsed.left), value, strip_roles(parsed.right), strip_roles(parsed.out))
    if is_weight(y):
        return _weighted(parsed, scope, x, value)
    left, right, out = _specs(parsed, scope.placement)
    a, b = reshard(x.astype(scope.compute), left), reshard(value.astype(scope.compute), right)
    result = _placed(scope, a, parsed.left, b, parsed.right, parsed.out, out)
    return reshard(result, scope.placement.spec(parsed.out))


def add(pattern: str, x: Array, bias: Weight) -> Array:
    """`x` plus a parameter with some of its axes: `add("batch seq mlp, mlp -> batch seq mlp", x, self.bias)`."""
    parsed = parse_einsum(pattern)
    value = _value(parsed, bias)
    _check_sizes(parsed, x, value)
    scope = current()
    names, target = strip_roles(parsed.right), strip_roles(parsed.left)
    if scope is None:
        return x + broadcast_to_axes(value, names, target)
    left, right, out = _specs(parsed, scope.placement)
    came = jax.typeof(x).sharding.spec

    @jax.custom_vjp
    def apply(x, w):
        return reshard(x, out) + broadcast_to_axes(reshard(w.astype(x.dtype), right), names, target)

    def backward(w, dy):
        ones = jnp.ones((), scope.reduce)
        spec = _partial(parsed, left, right)
        dw = _placed(scope, dy, parsed.left, ones, (), parsed.right, spec, scope.reduce)
        return reshard(dy, came) if current_explicit() else dy, as_cotangent(dw, w)

    apply.defvjp(lambda x, w: (apply(x, w), w), backward)
    return apply(x, value)


def _weighted(parsed: Contraction, scope: Scope, x: Array, weight: Array) -> Array:
    """A parameter's contraction, differentiated by hand: see `einsum`."""
    left, right, out = _specs(parsed, scope.placement)
    result = scope.placement.spec(parsed.out)

    def operands(x, w):
        a = Operand(x.astype(scope.compute), strip_roles(parsed.left), left)
        return a, Operand(w.astype(scope.compute), strip_roles(parsed.right), right).resharded()

    @jax.custom_vjp
    def apply(x, w):
        a, b = operands(x, w)
        return sharded_contract(scope, a, b, strip_roles(parsed.out), out, result)[0]

    def backward(kept, dy):
        x, w = kept
        a, b = operands(x, w)
        d = Operand(dy, strip_roles(parsed.out), out)
        came = jax.typeof(x).sharding.spec if current_explicit() else left
        dx, d = sharded_contract(scope, d, b, strip_roles(parsed.left), left, came)
        spec = _partial(parsed, left, right)
        dw, _ = sharded_contract(scope, a, d.resharded(), strip_roles(parsed.right), spec, spec, scope.reduce)
        return dx.astype(x.dtype), as_cotangent(dw, w)

    apply.defvjp(lambda x, w: (apply(x, w), (x, w)), backward)
    return apply(x, weight)


def _specs(parsed: Contraction, placement: Placement) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Where the two operands and the output of a contraction are while it is done, by the rule in `einsum`."""
    work = parsed.without_ambiguous_roles
    out = placement.spec(work.out)
    kept = dict(zip(work.out, out, strict=True))
    used = set(mesh_axes_of(out))

    def of(names: Names) -> PartitionSpec:
        rows = placement.spec(names)
        return PartitionSpec(*(kept.get(n, without(row, used)) for n, row in zip(names, rows, strict=True)))

    return of(work.left), of(work.right), out


def _partial(parsed: Contraction, left: PartitionSpec, right: PartitionSpec) -> PartitionSpec:
    """`right`, for a sum over the axes of the left operand only, which leaves each device with a part of it."""
    kept = strip_roles(parsed.right)
    summed = [
        a for n, entry in zip(strip_roles(parsed.left), left, strict=True) if n not in kept for a in entries(entry)
    ]
    return partial_spec(right, summed if supports_unreduced() else ())


def _value(parsed: Contraction, y: Any) -> Array:
    if not is_weight(y):
        return y
    if strip_roles(y.axes) != strip_roles(parsed.right):
        raise PatternError(f"{parsed.text!r}: this parameter's axes are {' '.join(y.axes)!r}")
    return y.get_value()


def _check_sizes(parsed: Contraction, x: Array, y: Array) -> None:
    check_rank(x, parsed.left, parsed.text)
    check_rank(y, parsed.right, parsed.text)
    sizes = dict(zip(strip_roles(parsed.left), x.shape, strict=True))
    for name, size in zip(strip_roles(parsed.right), y.shape, strict=True):
        if sizes.setdefault(name, size) != size:
            raise PatternError(f"{name!r} is {sizes[name]} in one operand of {parsed.text!r} and {size} in the other")
