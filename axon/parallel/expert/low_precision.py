"""Experts' products by a recipe of `axon.precision`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import MAX, Names, StoredWeight, per_device
from axon.axes.einsum import spec_of
from axon.axes.specs import entries, num_shards, partial_spec
from axon.errors import UserError
from axon.kernels.grouped_matmul import grouped_product, grouped_weight_gradient
from axon.kernels.quantized_matmul import Quantized, dequantize
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.sent_rows import INPUT, OUTPUT, used_rows
from axon.precision.formats import SEQUENCES, Format
from axon.precision.operation import RecipeOperation, Rounded, Side, rounded, scales_spec
from axon.precision.recipe import Recipe


@dataclass(frozen=True)
class ExpertRecipeProduct(RecipeOperation):
    """Rows sorted by expert, each by its own expert's matrix; `others` are how many rows each expert has, and of
    rows that were sent in 8 bits these and their scales.

    A row is a sequence of its own, and an expert a weight of its own: neither shares a scale with another. What is
    summed over rows shares the scales of all rows of an expert, over the devices that have some, or of blocks of them
    from the expert's first on each device.
    """

    mesh: ExpertMesh
    parts: Names

    @classmethod
    def of(
        cls,
        mesh: ExpertMesh,
        recipe: Recipe,
        rows: PartitionSpec,
        weight: PartitionSpec,
        out: PartitionSpec,
        parts: Names,
    ) -> "ExpertRecipeProduct":
        """`parts`: the mesh axes over which the weight's gradient is summed."""
        if not recipe.emulate and any(form.in_blocks for form in recipe.products.formats):
            name = type(recipe).__name__
            raise UserError(
                f"{name} scales blocks, and experts' matrices are multiplied so on no chip: leave them out of "
                f"{name}.paths, as {name}.paths = '*/attention/*', or set {name}.emulate = True"
            )
        x, y = (Side(_names(spec, name), spec) for spec, name in ((rows, INPUT), (out, OUTPUT)))
        return cls(mesh.scope, recipe, x, Side((SEQUENCES, INPUT, OUTPUT), weight), y, mesh, parts)

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        y, (saved, (sizes, *sent)) = super().forward(weight, *operands)
        return y, (saved, [sizes, *(None for _ in sent)])  # which `saved` is already

    def rounded(self, value: Array, side: Side, form: Format, out: Side, others: Sequence[Array]) -> Rounded:
        sizes, *sent = others
        if sent and side == self.x:
            return Rounded(Quantized(*sent), side.names, side.spec)
        here = spec_of(value, side.spec)
        used = per_device(used_rows, (here, self.mesh.rows), here)(value, sizes)
        return rounded(used, side.names, form, out.names, here, side.spec)

    def weight(self, weight: StoredWeight, form: Format, out: Side, others: Sequence[Array]) -> Rounded:
        stored = weight.stored()
        here = spec_of(stored, self.w.spec)
        return rounded(stored, self.w.names, form, out.names, here, self.w.spec).moved(self.w.spec)

    def scaled(self, dy: Array, by: Rounded, others: Sequence[Array]) -> Array:
        def local(dy: Array, scales: Array, sizes: Array) -> Array:
            of_rows = jnp.squeeze(scales, 1)[_experts(sizes, dy.shape[-2])]
            return dy.astype(jnp.float32) * of_rows

        scales = by.array.scales
        inputs = self.y.spec, scales_spec(by.spec, scales.shape), self.mesh.rows
        return per_device(local, inputs, self.y.spec)(dy, scales, others[0])

    def product(self, a: Rounded, b: Rounded, out: Side, dtype: Any, others: Sequence[Array]) -> Array:
        transposed = out == self.x

        def local(rows: Array, of_rows: Array, w: Array, of_w: Array, sizes: Array) -> Array:
            left, right = Quantized(_flat(rows), _flat(of_rows)), Quantized(w, of_w)
            if self.recipe.emulate:
                y = grouped_product(dequantize(left), dequantize(right), sizes, transposed=transposed)
            else:
                of_experts = jnp.squeeze(of_w, 2 if transposed else 1)[_experts(sizes, left.values.shape[0])]
                y = grouped_product(left.values, right.values, sizes, transposed=transposed)
                y = y * left.scales * of_experts
            return (y[None] if len(out.spec) == 3 else y).astype(dtype)

        inputs = [scales_spec(one.spec, part.shape) for one in (a, b) for part in one.array]
        return per_device(local, (*inputs, self.mesh.rows), out.spec)(*a.array, *b.array, others[0])

    def weight_gradient(self, x: Array | Quantized, dy: Array, others: Sequence[Array]) -> Array:
        of_input, form = self.recipe.products.weight_gradient
        parts = x if isinstance(x, Quantized) else (x,)

        def local(dy: Array, sizes: Array, *parts: Array) -> Array:
            (rows, *scales), dy = map(_flat, parts), _flat(dy).astype(jnp.float32)
            if of_input is None:
                a, dy = _SharedByRows(rows, jnp.ones((1, 1), jnp.float32), None), dy * scales[0]
            else:
                a = self._shared(rows, self.x, of_input, sizes)
            b = self._shared(dy, self.y, form, sizes)
            return self._outer(a, b, sizes).astype(self.scope.reduce)

        specs = [scales_spec(self.x.spec, part.shape) for part in parts]
        run = per_device(local, (self.y.spec, self.mesh.rows, *specs), partial_spec(self.w.spec, self.parts))
        return run(dy, others[0], *parts)

    def _shared(self, rows: Array, side: Side, form: Format, sizes: Array) -> "_SharedByRows":
        """The rows of one device for a sum over those of each expert."""
        used = used_rows(rows, sizes)
        place, count = _places(sizes, rows.shape[0], form.share if isinstance(form.share, int) else None)
        columns = entries(side.spec[-1]) if form.share == "tensor" else ()
        each = jnp.abs(used.astype(jnp.float32))
        each = MAX.over(each, axis=1, keepdims=True) if form.share == "tensor" else each
        largest = _largest_of_places(each, place, count)
        over = (*columns, *(() if form.in_blocks else self.mesh.replicas))
        largest = MAX.over_mesh_axis(largest, over) if num_shards(over) > 1 else largest
        scales = form.scales(largest)
        return _SharedByRows(form.values(used, scales[place]), scales, place)

    def _outer(self, a: "_SharedByRows", b: "_SharedByRows", sizes: Array) -> Array:
        if self.recipe.emulate:
            return grouped_weight_gradient(a.wide, b.wide, sizes)
        return grouped_weight_gradient(a.values, b.values, sizes) * a.scales[:, :, None] * b.scales[:, None, :]


class _SharedByRows(NamedTuple):
    """Rows in 8 bits, of which several share a scale."""

    values: Array  # rows columns
    scales: Array  # places columns, or one for all columns
    place: Array | None  # rows: whose scale is each one's; None where all share one

    @property
    def wide(self) -> Array:
        scales = self.scales if self.place is None else self.scales[self.place]
        return self.values.astype(jnp.float32) * scales


def _places(sizes: Array, rows: int, block: int | None) -> tuple[Array, int]:
    """The number of each row's expert, or of its block of rows of one expert; and how many numbers there are."""
    expert, experts = _experts(sizes, rows), sizes.shape[0]
    if block is None:
        return expert, experts
    blocks, count = -(-sizes // block), rows // block + experts
    within = jnp.arange(rows) - (jnp.cumsum(sizes) - sizes)[expert]
    return jnp.minimum((jnp.cumsum(blocks) - blocks)[expert] + within // block, count - 1), count


def _experts(sizes: Array, rows: int) -> Array:
    """`rows`: the expert of each; of those of none, the last."""
    return jnp.minimum(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right"), sizes.shape[0] - 1)


def _largest_of_places(values: Array, place: Array, count: int) -> Array:
    """`rows columns`, not negative → the largest of each place; compared as integers, so that NaN is the largest."""
    bits = jax.ops.segment_max(lax.bitcast_convert_type(values, jnp.int32), place, count, indices_are_sorted=True)
    return lax.bitcast_convert_type(jnp.maximum(bits, 0), jnp.float32)


def _flat(rows: Array) -> Array:
    return rows.reshape(-1, rows.shape[-1])


def _names(spec: PartitionSpec, last: str) -> Names:
    """The axes of rows, and before them that of copies where there are such."""
    return (*("copies",) * (len(spec) - 2), SEQUENCES, last)
