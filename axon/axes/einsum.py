"""`einsum` and `add`: contraction and sum by name, each operand moved to where the output's names put it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes.contraction import broadcast_to_axes, contract
from axon.axes.patterns import Contraction, Names, PatternError, parse_einsum, strip_roles
from axon.axes.placing import check_rank, current_explicit, per_device, reshard, supports_unreduced
from axon.axes.scope import Placement, Scope, current
from axon.axes.sharded_contraction import Operand, contract_in_place, sharded_contract
from axon.axes.specs import entries, mesh_axes_of, partial_spec, without
from axon.axes.statistics import OperandStatistic, Report, device_report
from axon.axes.weight import (
    CompositeWeight,
    Operation,
    Stored,
    StoredWeight,
    Weight,
    frozen_array,
    is_weight,
    stored_array,
    use_weight,
)


def einsum(pattern: str, x: Array, y: Array | Weight | CompositeWeight) -> Array:
    """Contract two operands by name, each moved to where the output's names put it.

    Axes kept in the output take the output's mesh axes; contracted axes take the activations' row, without the mesh
    axes that the output already uses. The second operand may be a parameter (see `axon.axes.weight.use_weight`), or
    a weight that brings its own contraction.

    Shapes: as the pattern says. Raises `PatternError` where pattern and operands disagree.
    """
    parsed = parse_einsum(pattern)
    _check_operands(parsed, x, y)
    if isinstance(y, CompositeWeight):
        return y.contract(parsed, x)
    value: Any = stored_array(y, "einsum") if is_weight(y) else y
    _check_sizes(parsed, x, value)
    scope = current()
    if scope is None:
        return contract(x, strip_roles(parsed.left), value, strip_roles(parsed.right), strip_roles(parsed.out))
    if is_weight(y):
        return use_weight(scope, _Product(scope, parsed, *contraction_specs(parsed, scope.placement)), value, x)
    left, right, out = contraction_specs(parsed, scope.placement)
    a, b = reshard(x.astype(scope.compute), left), reshard(value.astype(scope.compute), right)
    result = contract_in_place(
        scope, a, strip_roles(parsed.left), b, strip_roles(parsed.right), strip_roles(parsed.out), out
    )
    return reshard(result, scope.placement.spec(parsed.out))


def reporting_einsum(contraction: Contraction, x: Array, weight: Weight, report: Report) -> Array:
    """`einsum` of `x` with a parameter, which reports a statistic of the `OPERANDS`.

    `x` and the cotangent `dy` are seen in the compute dtype, the parameter as it is stored.
    """
    scope, value = current(), stored_array(weight, "reporting_einsum")
    assert scope is not None  # nothing is reported but in a step
    product = _Product(scope, contraction, *contraction_specs(contraction, scope.placement))
    return use_weight(scope, _Reporting(product, report.statistic), value, x, report.array)


def decoding_einsum(
    contraction: Contraction, x: Array, codes: Weight, decode: Callable[..., Array], parts: Sequence[Stored]
) -> Array:
    """`einsum` of `x` with the frozen weight that `decode(codes, *parts)` gives, float32, of arrays with its axes.

    Codes and parts are what is gathered, and what is kept for the backward: each device decodes what it multiplies,
    forward and backward. Along an axis of 1 a part is the same for all.
    """
    scope, value = current(), stored_array(codes, "decoding_einsum")
    if scope is None:
        left, right, out = _bare(contraction)
        return contract(x, left, decode(value, *parts), right, out)
    product = _Product(scope, contraction, *contraction_specs(contraction, scope.placement))
    return use_weight(scope, _Decoding(product, decode), value, x, *map(frozen_array, parts))


def add(pattern: str, x: Array, bias: Weight) -> Array:
    """`x` plus a parameter with some of its axes: `add("batch seq mlp, mlp -> batch seq mlp", x, self.bias)`."""
    parsed = parse_einsum(pattern)
    _check_operands(parsed, x, bias)
    value = stored_array(bias, f"add({pattern!r})")
    _check_sizes(parsed, x, value)
    scope = current()
    if scope is None:
        return x + broadcast_to_axes(value, strip_roles(parsed.right), strip_roles(parsed.left))
    return use_weight(scope, _Sum(scope, parsed, *contraction_specs(parsed, scope.placement)), value, x)


@dataclass(frozen=True)
class _Product(Operation):
    """The contraction of `x` with a weight; specs of both and of the result, while the work is done."""

    scope: Scope
    parsed: Contraction
    left: PartitionSpec
    right: PartitionSpec
    out: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Array]:
        (x,) = operands
        result = self.scope.placement.spec(self.parsed.out)
        a, b = self._operands(weight, x)
        return sharded_contract(self.scope, a, b, strip_roles(self.parsed.out), self.out, result)[0], x

    def backward(self, weight: StoredWeight, saved: Array, cotangent: Array) -> tuple[Array | None, Array]:
        x = saved
        left, right, out = _bare(self.parsed)
        a, b = self._operands(weight, x)
        d = Operand(cotangent, out, self.out)
        dx, d = sharded_contract(self.scope, d, b, left, self.left, spec_of(x, self.left))
        if not weight.trained:
            return None, dx
        spec = _partial(self.parsed, self.left, self.right)
        dw, _ = sharded_contract(self.scope, a, d.resharded(), right, spec, spec, self.scope.reduce)
        return dw, dx

    def _operands(self, weight: StoredWeight, x: Array) -> tuple[Operand, Operand]:
        left, right, _ = _bare(self.parsed)
        a = Operand(x.astype(self.scope.compute), left, self.left)
        return a, Operand(weight.gathered(self.right), right, self.right)


@dataclass(frozen=True)
class _Reporting(Operation):
    """A product that reports a statistic of its operands."""

    product: _Product
    statistic: OperandStatistic

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Array]:
        x, _ = operands
        return self.product.forward(weight, x)

    def backward(self, weight: StoredWeight, saved: Array, cotangent: Array) -> tuple[Array | None, ...]:
        product, compute = self.product, self.product.scope.compute
        operands = saved.astype(compute), weight.stored(), cotangent.astype(compute)
        stored = product.scope.placement.spec(product.parsed.right, "params")
        specs = tuple(map(spec_of, operands, (product.left, stored, product.out)))
        report = device_report(lambda *parts: [self.statistic(part) for part in parts], specs)
        return *product.backward(weight, saved, cotangent), report(*operands)


@dataclass(frozen=True)
class _Decoded(StoredWeight):
    """A weight that is decoded when it is gathered."""

    decode: Callable[..., Array] = field(kw_only=True)
    parts: Sequence[Array] = field(kw_only=True)

    def gathered(self, spec: PartitionSpec) -> Array:
        own = part_specs(spec, self.parts)
        parts = [reshard(part, place) for part, place in zip(self.parts, own, strict=True)]
        values = per_device(self.decode, (spec, *own), spec)(self.moved(spec), *parts)
        return values.astype(self.scope.compute)


@dataclass(frozen=True)
class _Decoding(Operation):
    """A product with a weight that is decoded."""

    product: _Product
    decode: Callable[..., Array]

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        x, *parts = operands
        return self.product.forward(self._decoded(weight, parts), x)[0], (x, parts)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Array) -> tuple[Array | None, ...]:
        x, parts = saved
        _, dx = self.product.backward(self._decoded(weight, parts), x, cotangent)
        return None, dx, *[None for _ in parts]

    def _decoded(self, weight: StoredWeight, parts: Sequence[Array]) -> _Decoded:
        return _Decoded(weight.scope, weight.value, decode=self.decode, parts=parts)


@dataclass(frozen=True)
class _Sum(Operation):
    """The sum of `x` and a weight with some of its axes; specs as of `_Product`."""

    scope: Scope
    parsed: Contraction
    left: PartitionSpec
    right: PartitionSpec
    out: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, None]:
        (x,) = operands
        left, right, _ = _bare(self.parsed)
        bias = broadcast_to_axes(weight.gathered(self.right).astype(x.dtype), right, left)
        return reshard(x, self.out) + bias, None

    def backward(self, weight: StoredWeight, saved: None, cotangent: Array) -> tuple[Array | None, Array]:
        if not weight.trained:
            return None, cotangent
        # Contracted with a scalar one, not summed: a plain sum would be in the dtype of the cotangent, and its type
        # would have it reduced over devices at once, for each microbatch and before it is cut for ZeRO.
        one = jnp.ones((), self.scope.reduce)
        spec, (left, right, _) = _partial(self.parsed, self.left, self.right), _bare(self.parsed)
        return contract_in_place(self.scope, cotangent, left, one, (), right, spec, self.scope.reduce), cotangent


def _bare(parsed: Contraction) -> tuple[Names, Names, Names]:
    """The names of both operands and of the output, without roles."""
    return strip_roles(parsed.left), strip_roles(parsed.right), strip_roles(parsed.out)


def spec_of(x: Array, default: PartitionSpec) -> PartitionSpec:
    """Where `x` lies; `default` on Auto mesh axes, where its type does not say."""
    return jax.typeof(x).sharding.spec if current_explicit() else default


def part_specs(spec: PartitionSpec, parts: Sequence[Array]) -> list[PartitionSpec]:
    """Where the parts of a weight that lies under `spec` are: those that are the same for all along an axis, whole."""
    return [PartitionSpec(*(None if n == 1 else e for n, e in zip(x.shape, spec, strict=True))) for x in parts]


def contraction_specs(parsed: Contraction, placement: Placement) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Where the two operands and the output of a contraction are while it is done, by the rule in `einsum`."""
    work = parsed.without_ambiguous_roles
    out = placement.spec(work.out)
    row_of = dict(zip(work.out, out, strict=True))
    used = set(mesh_axes_of(out))

    def of(names: Names) -> PartitionSpec:
        rows = placement.spec(names)
        return PartitionSpec(*(row_of.get(n, without(row, used)) for n, row in zip(names, rows, strict=True)))

    return of(work.left), of(work.right), out


def _partial(parsed: Contraction, left: PartitionSpec, right: PartitionSpec) -> PartitionSpec:
    """`right`, for a sum over the axes of the left operand only, which leaves each device with a part of it."""
    names, own, _ = _bare(parsed)
    summed = [a for name, entry in zip(names, left, strict=True) if name not in own for a in entries(entry)]
    return partial_spec(right, summed if supports_unreduced() else ())


def _check_operands(parsed: Contraction, x: Any, y: Any) -> None:
    if is_weight(x):
        swapped = f"{' '.join(parsed.right)}, {' '.join(parsed.left)} -> {' '.join(parsed.out)}"
        raise PatternError(
            f"the first operand of {parsed.text!r} is a parameter (its axes are {' '.join(x.axes)!r}), and a parameter "
            f"comes second: swap the two and write {swapped!r}"
        )
    check_rank(x, parsed.left, parsed.text)
    if is_weight(y) and strip_roles(y.axes) != strip_roles(parsed.right):
        raise PatternError(f"{parsed.text!r}: this parameter's axes are {' '.join(y.axes)!r}")


def _check_sizes(parsed: Contraction, x: Array, y: Array) -> None:
    check_rank(y, parsed.right, parsed.text)
    sizes = dict(zip(strip_roles(parsed.left), x.shape, strict=True))
    for name, size in zip(strip_roles(parsed.right), y.shape, strict=True):
        if sizes.setdefault(name, size) != size:
            raise PatternError(f"{name!r} is {sizes[name]} in one operand of {parsed.text!r} and {size} in the other")
