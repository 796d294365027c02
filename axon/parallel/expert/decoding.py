"""Experts' products with matrices that are decoded, expert by expert, where they are multiplied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import LayerWeight, Operation, StoredWeight, per_device, reshard
from axon.axes.einsum import part_specs
from axon.kernels.grouped_matmul import decoding_grouped_product
from axon.parallel.expert.devices import ExpertMesh


@dataclass(frozen=True)
class DecodingProduct(Operation):
    """Rows sorted by expert, each by its own expert's matrix, which does not train; specs as of `_Product`.

    The stored weight are codes; of the `others` the first are how many rows each expert has, the rest the arrays with
    the weight's axes that `decode` takes besides. They are what is gathered, and what is kept for the backward.
    """

    mesh: ExpertMesh
    rows: PartitionSpec
    weight: PartitionSpec
    out: PartitionSpec
    decode: Callable[..., Array]

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Any]:
        rows, *others = operands
        return self._product(weight, rows, others, transposed=False), others

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Array) -> tuple[Array | None, ...]:
        return None, self._product(weight, cotangent, saved, transposed=True), *(None for _ in saved)

    def _product(self, weight: StoredWeight, rows: Array, others: Sequence[Array], *, transposed: bool) -> Array:
        sizes, *parts = others
        before, after = (self.out, self.rows) if transposed else (self.rows, self.out)
        of_parts = part_specs(self.weight, parts)

        def local(rows: Array, sizes: Array, codes: Array, parts: Sequence[Array], *layer: Array) -> Array:
            first = layer[0] * sizes.shape[0] if layer else 0
            codes = codes.reshape(-1, *codes.shape[-2:])
            flat = rows.reshape(-1, rows.shape[-1])
            y = decoding_grouped_product(flat, (codes, *parts), self.decode, sizes, first, transposed=transposed)
            return y[None] if len(after) == 3 else y

        stacked = weight.in_stack(self.weight)
        codes, specs = self._read(weight, stacked)
        run = per_device(local, (before, self.mesh.rows, specs[0], of_parts, *specs[1:]), after)
        placed = [reshard(part, spec) for part, spec in zip(parts, of_parts, strict=True)]
        return run(reshard(rows.astype(self.mesh.scope.compute), before), sizes, codes[0], placed, *codes[1:])

    def _read(self, weight: StoredWeight, stacked: LayerWeight | None) -> tuple[tuple[Array, ...], Any]:
        """The codes and their spec: the layer's; or those of all layers, and which layer's."""
        if stacked is None:
            return (weight.moved(self.weight),), (self.weight,)
        return (stacked.stack, stacked.layer), (PartitionSpec(None, *self.weight), PartitionSpec())
