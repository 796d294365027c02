"""T5's bias of scores by how far a key is from its query."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from axon import axes
from axon.axes import einsum
from axon.axes.specs import entries, num_shards
from axon.nn.param import Dims, Param, normal


class RelativeBias(nnx.Module):
    """A learned number for each head and each bucket of distances, one module for all layers (Raffel et al.,
    arXiv:1910.10683, section 2.1).

    Args:
        dims: sizes of heads and buckets. max_distance: from there on all distances are in one bucket.
        both_sides: whether queries see keys after them: these have half of the buckets.
    """

    def __init__(self, dims: Dims, max_distance: int, both_sides: bool):
        self.table = Param("heads buckets", dims, normal(dims["embed"] ** -0.5), decay=False)
        self.buckets, self.max_distance, self.both_sides = dims["buckets"], max_distance, both_sides

    def __call__(self, seq: int) -> Array:
        """`batch seq heads distances`, for attention over `seq` keys, or over a cache with room for so many: see
        `AttentionInputs.distance_bias`.

        Once for each part that the layout cuts `batch` and `seq` into, so that a device's gradient is of its own part,
        and `einsum` sums it over devices as it does any weight's.
        """
        scope = axes.current()
        parts = (None, None) if scope is None else scope.placement.spec(("batch", "seq.attention"))
        of_distance = np.eye(self.buckets, dtype=np.float32)[self._bucket(np.arange(2 * seq - 1) - (seq - 1))]
        copies = jnp.broadcast_to(of_distance, (*(num_shards(entries(p)) for p in parts), *of_distance.shape))
        out = "batch seq.attention heads.attention _distances"
        return einsum(f"batch seq.attention _distances buckets, heads buckets -> {out}", copies, self.table)

    def flops(self, seq: int) -> int:
        """None to speak of: a look-up."""
        return 0

    def _bucket(self, distance: np.ndarray) -> np.ndarray:
        """Near distances each have a bucket; those of further ones grow with the logarithm."""
        first, buckets = np.zeros_like(distance), self.buckets
        if self.both_sides:
            buckets //= 2
            first, distance = buckets * (distance > 0), np.abs(distance)
        else:
            distance = -np.minimum(distance, 0)
        near = buckets // 2
        share = np.log(np.maximum(distance, 1).astype(np.float32) / near) / math.log(self.max_distance / near)
        far = np.minimum(near + (share * (buckets - near)).astype(np.int32), buckets - 1)
        return first + np.where(distance < near, distance, far)
