"""A weight's three products by a recipe: operands are rounded where they lie, sent in 8 bits, and summed wide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import Names, Operation, Scope, StoredWeight, per_device, reshard, strip_roles
from axon.axes.contraction import broadcast_to_axes, contract
from axon.axes.einsum import contraction_specs, spec_of
from axon.axes.patterns import Contraction
from axon.axes.specs import entries, num_shards, partial_spec
from axon.axes.statistics import OPERANDS, device_report, largest_magnitude
from axon.errors import UserError
from axon.kernels.quantized_matmul import Quantized, dequantize
from axon.precision import matrices
from axon.precision.formats import SEQUENCES, Format, largest_magnitudes, quantized
from axon.precision.recipe import Recipe

Recorded = Sequence[Array]
"""The largest magnitudes to be expected of `OPERANDS`, and what theirs are reported to, if scales follow from them."""


class Rounded(NamedTuple):
    """An operand in 8 bits on all devices, with its axes; its scales have as many, each of size 1 or more."""

    array: Quantized
    names: Names
    spec: PartitionSpec

    def moved(self, spec: PartitionSpec) -> "Rounded":
        values, scales = self.array
        placed = Quantized(reshard(values, spec), reshard(scales, _scales_spec(spec, scales.shape)))
        return Rounded(placed, self.names, spec)


@dataclass(frozen=True)
class RecipeProduct(Operation):
    """The contraction of `x` with a weight by a recipe; specs of both and of the result, while the work is done."""

    scope: Scope
    parsed: Contraction
    recipe: Recipe
    left: PartitionSpec
    right: PartitionSpec
    out: PartitionSpec

    @classmethod
    def of(cls, scope: Scope, parsed: Contraction, recipe: Recipe) -> "RecipeProduct":
        return cls(scope, parsed, recipe, *contraction_specs(parsed, scope.placement))

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        x, *recorded = operands
        form, of_weight = self.recipe.products.forward
        a = self._input(x, form, self._out, recorded)
        b = self._weight(weight, of_weight, self._out, recorded)
        y = self._product(a.moved(self.left), b, self._out, self.out, self.scope.compute)
        saved = x if self.recipe.products.weight_gradient[0] is not None else a.array
        return reshard(y, self.scope.placement.spec(self.parsed.out)), (saved, recorded)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Array) -> tuple[Array | None, ...]:
        (x, recorded), dy = saved, reshard(cotangent, self.out)
        dx = self._input_gradient(weight, dy, recorded)
        dw = self._weight_gradient(x, dy, recorded) if weight.trained else None
        return dw, dx, *[None for _ in recorded[:1]], *[self._report(x, weight, dy) for _ in recorded[1:]]

    def _report(self, x: Array, weight: StoredWeight, dy: Array) -> Array:
        """The largest magnitudes of what is rounded, for the scales of steps to come."""
        stored = weight.stored()
        specs = spec_of(x, self.left), self._stored_spec(stored), self.out
        return device_report(lambda *parts: [largest_magnitude(part) for part in parts], specs)(x, stored, dy)

    def _input_gradient(self, weight: StoredWeight, dy: Array, recorded: Recorded) -> Array:
        form, of_weight = self.recipe.products.input_gradient
        if of_weight is None:
            w = self._weight(weight, self.recipe.products.forward[1], self._out, recorded)
            dy, w = _with_scales_of(w, dy, self._out, self.out)
        else:
            w = self._weight(weight, of_weight, self._left, recorded)
        d = self._cotangent(dy, form, self._left, recorded)
        return self._product(d, w, self._left, self.left, self.scope.compute)

    def _weight_gradient(self, saved: Any, dy: Array, recorded: Recorded) -> Array:
        of_input, form = self.recipe.products.weight_gradient
        if of_input is None:
            x = Rounded(saved, self._left, spec_of(saved.values, self.left)).moved(self.left)
            dy, x = _with_scales_of(x, dy, self._out, self.out)
        else:
            x = self._input(saved, of_input, self._right, recorded).moved(self.left)
        d = self._cotangent(dy, form, self._right, recorded)
        return self._product(x, d, self._right, self.right, self.scope.reduce)

    def _input(self, x: Array, form: Format, out: Names, recorded: Recorded) -> Rounded:
        return rounded(x, self._left, form, out, spec_of(x, self.left), self.left, _of("x", recorded))

    def _cotangent(self, dy: Array, form: Format, out: Names, recorded: Recorded) -> Rounded:
        return rounded(dy, self._out, form, out, self.out, self.out, _of("dy", recorded))

    def _weight(self, weight: StoredWeight, form: Format, out: Names, recorded: Recorded) -> Rounded:
        stored = weight.stored()
        here, largest = self._stored_spec(stored), _of("w", recorded)
        return rounded(stored, self._right, form, out, here, self.right, largest).moved(self.right)

    def _stored_spec(self, stored: Array) -> PartitionSpec:
        return spec_of(stored, self.scope.placement.spec(self.parsed.right, "params"))

    def _product(self, a: Rounded, b: Rounded, out: Names, spec: PartitionSpec, dtype: Any) -> Array:
        """The product in `dtype`, whose sum over devices is not yet made where a type can say so; on a GPU each device
        makes its own by `quantized_matmul`, if it is one of matrices."""
        on_gpu = self.scope.placement.platform == "gpu" and not self.recipe.emulate

        def local(a_values: Array, a_scales: Array, b_values: Array, b_scales: Array) -> Array:
            left, right = Quantized(a_values, a_scales), Quantized(b_values, b_scales)
            if on_gpu and matrices.fits(left, a.names, right, b.names, out):
                return matrices.product(left, a.names, right, b.names, out, dtype)
            return self._local(left, a.names, right, b.names, out).astype(dtype)

        summed = [
            axis for name, e in zip(a.names, a.spec.partitions, strict=True) if name not in out for axis in entries(e)
        ]
        inputs = [_scales_spec(one.spec, part.shape) for one in (a, b) for part in one.array]
        return per_device(local, inputs, partial_spec(spec, summed))(*a.array, *b.array)

    def _local(self, a: Quantized, a_names: Names, b: Quantized, b_names: Names, out: Names) -> Array:
        """The product of one device's parts, float32."""
        summed = frozenset(a_names) - frozenset(out)
        varying = {n for names, one in ((a_names, a), (b_names, b)) for n in _varying(names, one) if n in summed}
        if not varying:
            return self._scaled(a, a_names, b, b_names, out)
        if self.recipe.emulate:
            return self._contract(dequantize(a), a_names, dequantize(b), b_names, out, jnp.float32)
        assert varying == {SEQUENCES}  # the recipe's check refuses what no chip has
        return self._by_sequence(a, a_names, b, b_names, out)

    def _by_sequence(self, a: Quantized, a_names: Names, b: Quantized, b_names: Names, out: Names) -> Array:
        """The sum of a product for each sequence, unrolled: one product of all would have no place for their scales."""
        i, j = a_names.index(SEQUENCES), b_names.index(SEQUENCES)
        names = tuple(tuple(n for n in one if n != SEQUENCES) for one in (a_names, b_names))
        total = None
        for number in range(a.values.shape[i]):
            one, other = _sequence(a, i, number), _sequence(b, j, number)
            product = self._scaled(one, names[0], other, names[1], out)
            total = product if total is None else total + product
        assert total is not None  # a batch has sequences
        return total

    def _scaled(self, a: Quantized, a_names: Names, b: Quantized, b_names: Names, out: Names) -> Array:
        """The product of values, times the scales, which are the same along all that is summed."""
        if self.recipe.emulate:
            left, right, wide = a.values.astype(jnp.float32), b.values.astype(jnp.float32), jnp.float32
        else:
            left, right = a.values, b.values
            wide = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
        y = self._contract(left, a_names, right, b_names, out, wide).astype(jnp.float32)
        return y * _of_result(a.scales, a_names, out) * _of_result(b.scales, b_names, out)

    def _contract(self, a: Array, a_names: Names, b: Array, b_names: Names, out: Names, dtype: Any) -> Array:
        flatten = self.scope.placement.platform == "cpu"
        precision = lax.Precision.HIGHEST if self.recipe.emulate else None
        return contract(a, a_names, b, b_names, out, None, dtype, flatten, precision)

    @property
    def _left(self) -> Names:
        return strip_roles(self.parsed.left)

    @property
    def _right(self) -> Names:
        return strip_roles(self.parsed.right)

    @property
    def _out(self) -> Names:
        return strip_roles(self.parsed.out)


def rounded(
    x: Array,
    names: Names,
    form: Format,
    out: Names,
    here: PartitionSpec,
    there: PartitionSpec,
    expected: Array | None = None,
) -> Rounded:
    """`x`, which lies under `here`, in a format for a product that leaves the axes `out`: rounded where it lies; or,
    where a block would be in two places, after it is moved to where it is multiplied.

    `expected`: the largest magnitude of all, from which scales follow where it is not 0, instead of from their own.
    """
    counts = form.num_scales(names, x.shape, frozenset(names) - frozenset(out))
    if not _fits(counts, here):
        x, here = reshard(x, there), there
    if not _fits(counts, here):
        raise UserError(
            f"the blocks of an operand {dict(zip(names, x.shape, strict=True))} are in several devices' parts, under "
            f"{here}: leave the weight out of the recipe's paths, or split the axis over fewer devices"
        )
    split = here.partitions
    own = tuple(n if n == 1 else n // num_shards(entries(e)) for n, e in zip(counts, split, strict=True))
    over = tuple(axis for n, e in zip(counts, split, strict=True) if n == 1 for axis in entries(e))

    def largest(x: Array) -> Array:
        return largest_magnitudes(x, own, over if num_shards(over) > 1 else ())

    def local(x: Array, *expected: Array) -> tuple[Array, Array]:
        known = [lax.cond(most > 0, lambda x, most=most: jnp.full(own, most), largest, x) for most in expected]
        values, scales = quantized(x, form, known[0] if known else largest(x))
        return values, scales

    more = [] if expected is None else [expected]
    place = PartitionSpec(*split)
    specs = place, _scales_spec(place, counts)
    run = per_device(local, (here, *(PartitionSpec() for _ in more)), specs)
    return Rounded(Quantized(*run(x, *more)), names, place)


def _with_scales_of(operand: Rounded, dy: Array, names: Names, spec: PartitionSpec) -> tuple[Array, Rounded]:
    """`dy`, with these axes and spec, times the scales of an operand that it is multiplied with, float32; and the
    operand without them."""
    values, scales = operand.array

    def local(dy: Array, scales: Array) -> Array:
        return dy.astype(jnp.float32) * _of_result(scales, operand.names, names)

    scaled = per_device(local, (spec, _scales_spec(operand.spec, scales.shape)), spec)(dy, scales)
    one = jnp.ones((1,) * values.ndim, jnp.float32)
    return scaled, operand._replace(array=Quantized(values, one))


def _of(operand: str, recorded: Recorded) -> Array | None:
    """The largest magnitude to be expected of an operand, if scales follow from that."""
    return recorded[0][OPERANDS.index(operand)] if recorded else None


def _of_result(scales: Array, names: Names, out: Names) -> Array:
    """Scales as they multiply a product that leaves the axes `out`; along others there is one."""
    kept = tuple(name for name in names if name in out)
    own = jnp.squeeze(scales, tuple(i for i, name in enumerate(names) if name not in out))
    return broadcast_to_axes(own, kept, out)


def _varying(names: Names, operand: Quantized) -> list[str]:
    """The axes along which an operand has more than one scale."""
    return [name for name, count in zip(names, operand.scales.shape, strict=True) if count > 1]


def _sequence(operand: Quantized, axis: int, number: int) -> Quantized:
    values, scales = operand
    of_scales = number if scales.shape[axis] > 1 else 0
    return Quantized(
        lax.index_in_dim(values, number, axis, keepdims=False),
        lax.index_in_dim(scales, of_scales, axis, keepdims=False),
    )


def _fits(counts: tuple[int, ...], spec: PartitionSpec) -> bool:
    return all(n == 1 or n % num_shards(entries(entry)) == 0 for n, entry in zip(counts, spec.partitions, strict=True))


def _scales_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Of scales of this shape, whose values lie under `spec`."""
    return PartitionSpec(*(None if size == 1 else entry for size, entry in zip(shape, spec.partitions, strict=True)))
