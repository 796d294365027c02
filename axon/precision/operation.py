"""A weight's three products by a recipe: which operand is rounded for which, and what is kept for the backward."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import MAX, Names, Operation, Scope, StoredWeight, per_device, reshard
from axon.axes.specs import entries, num_shards
from axon.errors import UserError
from axon.kernels import quantize
from axon.kernels.choice import choose, with_tpu
from axon.kernels.quantized_matmul import Quantized
from axon.precision.formats import E8M0, SEQUENCES, Format, largest_magnitudes, mx_bytes, mx_scales, quantized
from axon.precision.recipe import Recipe


class Side(NamedTuple):
    """An operand or the result of a product: its axes, without roles, and its spec while it is worked with."""

    names: Names
    spec: PartitionSpec


class Rounded(NamedTuple):
    """An operand in 8 bits on all devices, with its axes; its scales have as many, each of size 1 or more. Those that
    are `powers_of_two` travel as exponents, in 8 bits too."""

    array: Quantized
    names: Names
    spec: PartitionSpec
    powers_of_two: bool = False

    def moved(self, spec: PartitionSpec) -> "Rounded":
        (values, scales), place = self.array, scales_spec(spec, self.array.scales.shape)
        scales = mx_scales(reshard(mx_bytes(scales), place)) if self.powers_of_two else reshard(scales, place)
        return self._replace(array=Quantized(reshard(values, spec), scales), spec=spec)

    def without_scales(self) -> "Rounded":
        """The values alone, for a product with what is multiplied by the scales already."""
        one = jnp.ones((1,) * self.array.values.ndim, jnp.float32)
        return self._replace(array=Quantized(self.array.values, one))


@dataclass(frozen=True)
class RecipeOperation(Operation):
    """The product `y` of `x` with a weight `w` and its gradients by a recipe, for plain and for grouped products.

    What else a product takes beside the weight and `x` is passed on as `others`.
    """

    scope: Scope
    recipe: Recipe
    x: Side
    w: Side
    y: Side

    @abstractmethod
    def rounded(self, value: Array, side: Side, form: Format, out: Side, others: Sequence[Array]) -> Rounded:
        """`x` or `dy`, which is `side`, for the product that gives `out`."""

    @abstractmethod
    def weight(self, weight: StoredWeight, form: Format, out: Side, others: Sequence[Array]) -> Rounded:
        """The weight for the product that gives `out`, gathered."""

    @abstractmethod
    def scaled(self, dy: Array, by: Rounded, others: Sequence[Array]) -> Array:
        """`dy` times the scales of an operand that it is multiplied with, float32."""

    @abstractmethod
    def product(self, a: Rounded, b: Rounded, out: Side, dtype: Any, others: Sequence[Array]) -> Array:
        """The product in `dtype`, whose sum over devices is not yet made where a type can say so."""

    @abstractmethod
    def weight_gradient(self, x: Array | Quantized, dy: Array, others: Sequence[Array]) -> Array:
        """The weight's gradient, of which other devices may have a part; of `x`, or of what the forward made of it."""

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        x, *others = operands
        form, of_weight = self.recipe.products.forward
        a = self.rounded(x, self.x, form, self.y, others)
        b = self.weight(weight, of_weight, self.y, others)
        y = self.product(a.moved(self.x.spec), b, self.y, self.scope.compute, others)
        saved = x if self.recipe.products.weight_gradient[0] is not None else a.array
        return y, (saved, others)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Array) -> tuple[Array | None, ...]:
        (x, others), dy = saved, reshard(cotangent, self.y.spec)
        dx = self._input_gradient(weight, dy, others)
        dw = self.weight_gradient(x, dy, others) if weight.trained else None
        return dw, dx, *[None for _ in others]

    def _input_gradient(self, weight: StoredWeight, dy: Array, others: Sequence[Array]) -> Array:
        form, of_weight = self.recipe.products.input_gradient
        if of_weight is None:
            w = self.weight(weight, self.recipe.products.forward[1], self.y, others)
            dy, w = self.scaled(dy, w, others), w.without_scales()
        else:
            w = self.weight(weight, of_weight, self.x, others)
        d = self.rounded(dy, self.y, form, self.x, others)
        return self.product(d, w, self.x, self.scope.compute, others)


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

    summed = frozenset(names) - frozenset(out)
    everywhere = tuple(axis for n, e in zip(names, split, strict=True) if n != SEQUENCES for axis in entries(e))

    def of_all(largest: Array) -> Array:
        most = MAX.over(largest, axis=tuple(i for i, n in enumerate(names) if n != SEQUENCES), keepdims=True)
        return MAX.over_mesh_axis(most, everywhere) if num_shards(everywhere) > 1 else most

    def local(x: Array, *expected: Array) -> tuple[Array, ...]:
        shared = tuple(i for i, (n, size) in enumerate(zip(own, x.shape, strict=True)) if n == 1 < size)
        unfit = _without_one_pass(x.shape, form, own, over, expected) or quantize.unfit(x.shape, shared)
        if choose("quantize", with_tpu(unfit, {"xla": None}), form.dtype) == "tpu":
            return tuple(quantize.quantize_tpu(x, shared, form))
        x = form.rotated(x, names, summed, own)
        known = [lax.cond(most > 0, lambda x, most=most: jnp.full(own, most), largest, x) for most in expected]
        most = known[0] if known else largest(x)
        values, scales = quantized(x, form, most, of_all(most) if form.has_second else None)
        return values, scales

    more = [] if expected is None else [expected]
    place = PartitionSpec(*split)
    specs = place, scales_spec(place, counts)
    run = per_device(local, (here, *(PartitionSpec() for _ in more)), specs)
    return Rounded(Quantized(*run(x, *more)), names, place, form.scale_dtype == E8M0)


def _without_one_pass(
    shape: tuple[int, ...], form: Format, counts: tuple[int, ...], over: Names, expected: Sequence[Array]
) -> str | None:
    """Why the kernel that finds largest magnitudes and rounds at once cannot make a device's part of an operand; None
    where `quantize.unfit` decides."""
    if expected:
        return "scales follow from steps before"
    if num_shards(over) > 1:
        return "what shares a scale is on several devices"
    if form.has_second or form.hadamard or any(1 < n < size for n, size in zip(counts, shape, strict=True)):
        return "numbers share a scale in blocks"
    return None


def _fits(counts: tuple[int, ...], spec: PartitionSpec) -> bool:
    return all(n == 1 or n % num_shards(entries(entry)) == 0 for n, entry in zip(counts, spec.partitions, strict=True))


def scales_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of scales of this shape, whose values lie under `spec`."""
    return PartitionSpec(*(None if size == 1 else entry for size, entry in zip(shape, spec.partitions, strict=True)))
