"""Rows for experts in 8 bits: rounded before they are sent, as the products of a recipe would round them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import per_device, reshard
from axon.axes.specs import mesh_axes_of
from axon.kernels.quantized_matmul import Quantized
from axon.parallel.expert.devices import ExpertMesh
from axon.precision.formats import SEQUENCES, Format
from axon.precision.operation import rounded

INPUT, OUTPUT = "input", "output"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SentRows:
    """`copies rows embed` in 8 bits, with their scales.

    `place`: zeros of the compute dtype, which nothing reads, so that XLA makes none: integers have no gradient, and
    that of the rows is asked of these.
    """

    place: Array  # copies rows embed
    values: Array  # copies rows embed
    scales: Array  # copies rows blocks, float32; one block unless the format has several


def rounded_tokens(mesh: ExpertMesh, x: Array, form: Format) -> tuple[Quantized, PartitionSpec]:
    """`x[batch seq embed]` in a format as values `tokens embed` and scales, and where both are.

    A token shares its scales with no other, and neither do the rows that are copies of it: so they are what rounding
    the rows would give.
    """
    spec = PartitionSpec(mesh_axes_of(mesh.tokens) or None, None)
    flat = per_device(lambda x: x.reshape(-1, x.shape[-1]), (mesh.x,), spec)(reshard(x, mesh.x))
    return rounded(flat, (SEQUENCES, INPUT), form, (SEQUENCES, OUTPUT), spec, spec).array, spec


def used_rows(rows: Array, sizes: Array) -> Array:
    """The rows, with 0 for those of no expert, which may hold anything, NaN too."""
    return jnp.where((jnp.arange(rows.shape[-2]) < jnp.sum(sizes))[:, None], rows, 0)


def sent_rows(mesh: ExpertMesh, values: Array, scales: Array) -> SentRows:
    place = reshard(jnp.zeros(values.shape, mesh.scope.compute), mesh.wide)
    return SentRows(place, values, scales)
