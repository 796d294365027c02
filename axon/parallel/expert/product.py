"""Experts' matrices, each by the rows of its own expert."""

from dataclasses import dataclass

from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import HostWeight, Operation, StoredWeight, per_device, reshard, use_weight
from axon.axes.specs import partial_spec
from axon.kernels.grouped_matmul import grouped_matmul, grouped_matmul_gradients
from axon.parallel.expert.devices import ExpertMesh


@dataclass(frozen=True)
class Products:
    """What experts do with rows sorted by expert, of which each device has its own: two kinds of product.

    `sizes` are how many rows each expert has, of each device.
    """

    mesh: ExpertMesh
    sizes: Array

    def up(self, rows: Array, weight: Array | HostWeight) -> Array:
        """`copies rows embed` by `experts embed mlp` → `rows mlp`."""
        spec = PartitionSpec(self.mesh.experts or None, None, self.mesh.mlp or None)
        return self._use(_Product(self.mesh, self.mesh.wide, spec, self.mesh.inner), weight, rows)

    def down(self, rows: Array, weight: Array | HostWeight) -> Array:
        """`rows mlp` by `experts mlp embed` → `copies rows embed`, whose sum over the copies is the product."""
        spec = PartitionSpec(self.mesh.experts or None, self.mesh.mlp or None, None)
        return self._use(_Product(self.mesh, self.mesh.inner, spec, self.mesh.wide), weight, rows)

    def _use(self, product: "_Product", weight: Array | HostWeight, rows: Array) -> Array:
        return use_weight(self.mesh.scope, product, weight, rows, self.sizes)


@dataclass(frozen=True)
class _Product(Operation):
    """Specs of rows, weight and result; where the first dimension of three counts copies, a device has one."""

    mesh: ExpertMesh
    rows: PartitionSpec
    weight: PartitionSpec
    out: PartitionSpec

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, tuple[Array, Array]]:
        rows, sizes = operands

        def local(rows: Array, w: Array, sizes: Array) -> Array:
            return _with_copies(grouped_matmul(_flat(rows), w, sizes), self.out)

        run = per_device(local, (self.rows, self.weight, self.mesh.rows), self.out)
        return run(self._placed(rows, self.rows), weight.gathered(self.weight), sizes), (rows, sizes)

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
        run = per_device(local, inputs, (self.rows, partial_spec(gradient, self.mesh.replicas)))
        dy = self._placed(cotangent, self.out)
        dx, dw = run(self._placed(rows, self.rows), weight.gathered(self.weight), sizes, dy)
        if not weight.trained:
            return None, dx, None
        return weight.swapped_cotangent(dw) if swapped else dw, dx, None

    def _placed(self, rows: Array, spec: PartitionSpec) -> Array:
        return reshard(rows.astype(self.mesh.scope.compute), spec)


def _flat(rows: Array) -> Array:
    return rows.reshape(-1, rows.shape[-1])


def _with_copies(rows: Array, spec: PartitionSpec) -> Array:
    return rows[None] if len(spec) == 3 else rows
