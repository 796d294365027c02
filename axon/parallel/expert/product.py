"""Experts' matrices, scales and biases, each with the rows of its own expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import Names, Operation, Report, Stored, StoredWeight, current_explicit, per_device, reshard, use_weight
from axon.axes.specs import mesh_axes_of, partial_spec
from axon.axes.statistics import OperandStatistic, device_report
from axon.axes.weight import frozen_array
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.grouped_matmul import grouped_matmul, grouped_matmul_gradients
from axon.parallel.expert.decoding import DecodingProduct
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.low_precision import ExpertRecipeProduct
from axon.parallel.expert.sent_rows import SentRows
from axon.precision.formats import Format
from axon.precision.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """Two factors of each expert, whose product times `scale` is added to its matrix."""

    a: Stored  # experts inputs rank
    b: Stored  # experts rank outputs
    scale: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrix:
    """A matrix of each expert: `values`, times a scale for each of its outputs where it is in 8 bits, or those of which
    `decode` makes it with `parts`; plus products of low rank; times a factor for each of its outputs; and a bias. Its
    products report to `report`, or are made by `recipe`."""

    values: Stored  # experts inputs outputs
    scales: Stored | None = None  # experts outputs
    bias: Stored | None = None  # experts outputs
    low: tuple[LowRank, ...] = ()
    factors: Stored | None = None  # experts outputs
    report: Report | None = None
    recipe: Recipe | None = field(default=None, metadata={"static": True})
    parts: Sequence[Stored] = ()  # experts …
    decode: Callable[..., Array] | None = field(default=None, metadata={"static": True})

    @property
    def sent_format(self) -> Format | None:
        """The format of rows that are multiplied with it, if nothing else of them is needed, forward or backward."""
        if self.recipe is None or self.low or self.recipe.products.weight_gradient[0] is not None:
            return None
        return self.recipe.products.forward[0]


def sent_format(*matrices: Matrix) -> Format | None:
    """The format in which rows are sent that are multiplied with all of these; None: in the compute dtype."""
    first, *others = (matrix.sent_format for matrix in matrices)
    return first if all(other == first for other in others) else None


@dataclass(frozen=True)
class Products:
    """What experts do with rows sorted by expert, of which each device has its own: two kinds of product, and biases.

    `sizes` are how many rows each expert has, of each device. `own_ranks`: `copies rows rank`, 1 for the ranks of
    products of low rank that a row is multiplied with, else 0, those of a matrix's products one after the other; in the
    place of a product's ranks one number may be for all of them; None: all.
    """

    mesh: ExpertMesh
    sizes: Array
    own_ranks: Array | None = None

    def up(self, rows: Array | SentRows, matrix: Matrix) -> Array:
        """`copies rows embed` by `experts embed mlp`, plus `experts mlp` → `rows mlp`."""
        experts, mlp = self.mesh.experts or None, self.mesh.mlp or None
        product = _Product(self.mesh, self.mesh.wide, PartitionSpec(experts, None, mlp), self.mesh.inner)
        return self._through(product, matrix, rows)

    def down(self, rows: Array, matrix: Matrix, weights: Array) -> Array:
        """`rows mlp` by `experts mlp embed`, plus `experts embed` times the row's weight → `copies rows embed`, which
        are to be summed over the copies."""
        experts, mlp = self.mesh.experts or None, self.mesh.mlp or None
        product = _Product(self.mesh, self.mesh.inner, PartitionSpec(experts, mlp, None), self.mesh.wide)
        return self._through(product, matrix, rows, weights)

    def _through(self, product: "_Product", matrix: Matrix, rows: Array | SentRows, *weights: Array) -> Array:
        """The product with its scales, that of low rank, its factors, and the bias times the rows' weights, if there
        are any."""
        rows, *sent = (rows.place, rows.values, rows.scales) if isinstance(rows, SentRows) else (rows,)
        experts, inputs, columns = product.weight
        outputs = PartitionSpec(experts, columns)
        if matrix.decode is not None:
            decoding = DecodingProduct(self.mesh, product.rows, product.weight, product.out, matrix.decode)
            out = use_weight(
                self.mesh.scope, decoding, matrix.values, rows, self.sizes, *map(frozen_array, matrix.parts)
            )
        elif matrix.recipe is not None:
            out = self._use(product.by(matrix.recipe), matrix.values, rows, *sent)
        elif matrix.report is None:
            out = self._use(product, matrix.values, rows)
        else:
            out = self._use(_Reporting(product, matrix.report.statistic), matrix.values, rows, matrix.report.array)
        if matrix.scales is not None:
            out = self._use(_Scaled(self.mesh, product.out, outputs), matrix.scales, out)
        for number, low in enumerate(matrix.low):
            to_rank = _Product(self.mesh, product.rows, PartitionSpec(experts, inputs, None), self.mesh.wide)
            from_rank = _Product(self.mesh, self.mesh.wide, PartitionSpec(experts, None, columns), product.out)
            narrow = self._own(number, len(matrix.low), self._use(to_rank, low.a, rows))
            out += (low.scale * self._use(from_rank, low.b, narrow)).astype(out.dtype)
        if matrix.factors is not None:
            out = self._use(_Scaled(self.mesh, product.out, outputs), matrix.factors, out)
        if matrix.bias is not None:
            out = self._use(_Sum(self.mesh, product.out, outputs), matrix.bias, out, *weights)
        return out

    def _own(self, number: int, count: int, narrow: Array) -> Array:
        """Of `copies rows rank` of one of so many products of low rank what is a row's own, and 0."""
        if self.own_ranks is None:
            return narrow
        ranks = self.own_ranks.shape[-1] // count
        return jnp.where(self.own_ranks[..., number * ranks : (number + 1) * ranks] > 0, narrow, 0)

    def _use(self, operation: Operation, weight: Stored, rows: Array, *others: Array) -> Array:
        return use_weight(self.mesh.scope, operation, weight, rows, self.sizes, *others)


@dataclass(frozen=True)
class _Product(Operation):
    """Specs of rows, weight and result; where the first dimension of three counts copies, a device has one."""

    mesh: ExpertMesh
    rows: PartitionSpec
    weight: PartitionSpec
    out: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, tuple[Array, Array]]:
        rows, sizes = operands

        def local(rows: Array, sizes: Array, w: Array, *layer: Array) -> Array:
            first = [number * sizes.shape[0] for number in layer]
            out = grouped_matmul(_flat(rows), w.reshape(-1, *w.shape[-2:]), sizes, *first)
            return _with_copies(out, self.out)

        weights, specs = self._read(weight)
        run = per_device(local, (self.rows, self.mesh.rows, *specs), self.out)
        return run(self.placed(rows, self.rows), sizes, *weights), (rows, sizes)

    def backward(self, weight: StoredWeight, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array | None, ...]:
        rows, sizes = saved
        swapped = weight.splits_last_beyond(self.weight)

        def local(rows: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, Array]:
            reduce = self.mesh.scope.reduce
            dx, dw = grouped_matmul_gradients(_flat(rows), w, sizes, _flat(dy), reduce, swapped=swapped)
            return _with_copies(dx, self.rows), dw

        experts, inner, out = self.weight
        gradient = PartitionSpec(experts, out, inner) if swapped else self.weight
        inputs = (self.rows, self.weight, self.mesh.rows, self.out)
        run = per_device(local, inputs, (self.rows, partial_spec(gradient, self._parts)))
        dy = self.placed(cotangent, self.out)
        dx, dw = run(self.placed(rows, self.rows), self._gathered(weight), sizes, dy)
        if not weight.trained:
            return None, dx, None
        return weight.swapped_cotangent(dw) if swapped else dw, dx, None

    @property
    def _parts(self) -> Names:
        """The mesh axes over which a gradient is summed: those of `mlp` too, where the weight is not split by them."""
        return (*self.mesh.replicas, *(a for a in self.mesh.mlp if a not in mesh_axes_of(self.weight)))

    def by(self, recipe: Recipe) -> ExpertRecipeProduct:
        """The product by a recipe."""
        return ExpertRecipeProduct.of(self.mesh, recipe, self.rows, self.weight, self.out, self._parts)

    def _read(self, weight: StoredWeight) -> tuple[tuple[Array, ...], tuple[PartitionSpec, ...]]:
        """What is multiplied with, and its spec: the layer's matrices; or those of all layers, and which layer's."""
        found = weight.in_stack(self.weight)
        if found is None or found.dtype not in (self.mesh.scope.compute, *EIGHT_BITS):
            return (self._gathered(weight),), (self.weight,)
        return (found.stack, found.layer), (PartitionSpec(None, *self.weight), PartitionSpec())

    def _gathered(self, weight: StoredWeight) -> Array:
        """One in 8 bits as it is: what multiplies with it converts what it reads."""
        is_narrow = weight.value.dtype in EIGHT_BITS
        return weight.moved(self.weight) if is_narrow else weight.gathered(self.weight)

    def placed(self, rows: Array, spec: PartitionSpec) -> Array:
        return reshard(rows.astype(self.mesh.scope.compute), spec)


@dataclass(frozen=True)
class _Reporting(Operation):
    """A product that reports a statistic of its operands: of the rows those that are of an expert."""

    product: _Product
    statistic: OperandStatistic

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        rows, sizes, _ = operands
        return self.product.forward(weight, rows, sizes)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Array) -> tuple[Array | None, ...]:
        (rows, sizes), product = saved, self.product

        def values(rows: Array, w: Array, dy: Array, sizes: Array) -> list[Array]:
            is_used = (jnp.arange(rows.shape[-2]) < jnp.sum(sizes))[:, None]
            used = jnp.where(is_used, rows, 0), w, jnp.where(is_used, dy, 0)
            return [self.statistic(part) for part in used]

        w = weight.stored()
        stored = jax.typeof(w).sharding.spec if current_explicit() else product.weight
        report = device_report(values, (product.rows, stored, product.out, product.mesh.rows))
        placed = product.placed(rows, product.rows), w, product.placed(cotangent, product.out), sizes
        return *product.backward(weight, saved, cotangent), report(*placed)


@dataclass(frozen=True)
class _Scaled(Operation):
    """Rows times the scales of each one's expert; specs of both."""

    mesh: ExpertMesh
    rows: PartitionSpec
    scales: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, tuple[Array | None, Array]]:
        rows, sizes = operands
        return self._times(weight, rows, sizes), (rows if weight.trained else None, sizes)

    def backward(
        self, weight: StoredWeight, saved: tuple[Array | None, Array], cotangent: Array
    ) -> tuple[Array | None, ...]:
        rows, sizes = saved
        gradient = None if rows is None else self._of_scales(rows, sizes, cotangent)
        return gradient, self._times(weight, cotangent, sizes), None

    def _times(self, weight: StoredWeight, rows: Array, sizes: Array) -> Array:
        def local(rows: Array, scales: Array, sizes: Array) -> Array:
            own = _of_each_row(self.mesh, scales, sizes, rows.shape[-2])
            return (rows * own).astype(rows.dtype)

        run = per_device(local, (self.rows, self.scales, self.mesh.rows), self.rows)
        return run(reshard(rows, self.rows), weight.gathered(self.scales), sizes)

    def _of_scales(self, rows: Array, sizes: Array, cotangent: Array) -> Array:
        """The gradient of the scales: of each device's part of the rows."""

        def local(rows: Array, sizes: Array, dy: Array) -> Array:
            products = _flat(rows).astype(jnp.float32) * _flat(dy).astype(jnp.float32)
            return _sum_by_expert(self.mesh, products, sizes)

        of_scales = partial_spec(self.scales, (*self.mesh.replicas, *_copies_of(self.mesh, self.rows)))
        run = per_device(local, (self.rows, self.mesh.rows, self.rows), of_scales)
        return run(reshard(rows, self.rows), sizes, reshard(cotangent, self.rows))


@dataclass(frozen=True)
class _Sum(Operation):
    """Rows plus the bias of each one's expert, times the row's weight where there are weights; specs of both.

    Of copies the first alone gets it, since they are summed; and no row gets one that is of no expert.
    """

    mesh: ExpertMesh
    rows: PartitionSpec
    bias: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Sequence[Array]]:
        rows, *of_rows = operands

        def local(rows: Array, bias: Array, sizes: Array, *weights: Array) -> Array:
            own = _of_each_row(self.mesh, bias, sizes, rows.shape[-2])
            return rows + (own * self._factor(weights)).astype(rows.dtype)

        run = per_device(local, (self.rows, self.bias, *(self.mesh.rows for _ in of_rows)), self.rows)
        return run(reshard(rows, self.rows), weight.gathered(self.bias), *of_rows), of_rows

    def backward(self, weight: StoredWeight, saved: Sequence[Array], cotangent: Array) -> tuple[Array | None, ...]:
        def local(dy: Array, bias: Array, sizes: Array, *weights: Array) -> tuple[Array, ...]:
            dy, factor = _flat(dy), self._factor(weights)
            db = _sum_by_expert(self.mesh, (dy * factor).astype(dy.dtype), sizes)
            if not weights:
                return (db,)
            by_expert = _dot(self.mesh, dy, bias.T, jnp.float32)
            own = _is_own(sizes, dy.shape[0], dy.dtype)
            return db, jnp.sum(by_expert * own, axis=1) * self._is_first()

        inputs = (self.rows, self.bias, *(self.mesh.rows for _ in saved))
        of_bias = partial_spec(self.bias, (*self.mesh.replicas, *self._copies))
        outputs = (of_bias, *(partial_spec(self.mesh.rows, self._copies) for _ in saved[1:]))
        run = per_device(local, inputs, outputs)
        dy = reshard(cotangent.astype(self.mesh.scope.compute), self.rows)
        db, *dweights = run(dy, weight.gathered(self.bias), *saved)
        return db if weight.trained else None, cotangent, None, *dweights

    def _factor(self, weights: Sequence[Array]) -> Any:
        """What the bias of each row is multiplied by, `rows 1` or a scalar."""
        return self._is_first() * weights[0][:, None] if weights else self._is_first()

    def _is_first(self) -> Any:
        """1 on the device of the first copy, 0 on those of the others."""
        return (lax.axis_index(self._copies) == 0).astype(jnp.float32) if self._copies else 1

    @property
    def _copies(self) -> Names:
        """Of the copies of the rows one counts."""
        return _copies_of(self.mesh, self.rows)


def _sum_by_expert(mesh: ExpertMesh, rows: Array, sizes: Array) -> Array:
    """`rows outputs` → `experts outputs`, the sum over each expert's rows.

    Rows of no expert may hold anything, NaN too, which a product with 0 would carry on.
    """
    own = _is_own(sizes, rows.shape[0], rows.dtype)
    return _dot(mesh, own.T, jnp.where(jnp.any(own, axis=1, keepdims=True), rows, 0), mesh.scope.reduce)


def _of_each_row(mesh: ExpertMesh, of_experts: Array, sizes: Array, rows: int) -> Array:
    """`rows outputs`, float32: of `experts outputs` that of each row's expert, 0 for a row of none."""
    return _dot(mesh, _is_own(sizes, rows, of_experts.dtype), of_experts, jnp.float32)


def _dot(mesh: ExpertMesh, x: Array, y: Array, dtype: Any) -> Array:
    return jnp.dot(x, y, precision=mesh.scope.precision, preferred_element_type=dtype)


def _is_own(sizes: Array, rows: int, dtype: Any) -> Array:
    """`rows experts`: 1 where a row is the expert's, of rows sorted by expert. A product with it sums or selects
    rows without a gather or a scatter."""
    ends, number = jnp.cumsum(sizes), jnp.arange(rows)[:, None]
    return ((ends - sizes <= number) & (number < ends)).astype(dtype)


def _copies_of(mesh: ExpertMesh, rows: PartitionSpec) -> Names:
    """The mesh axes whose devices have copies of the rows."""
    return mesh.mlp if len(rows) == 3 else ()


def _flat(rows: Array) -> Array:
    return rows.reshape(-1, rows.shape[-1])


def _with_copies(rows: Array, spec: PartitionSpec) -> Array:
    return rows[None] if len(spec) == 3 else rows
