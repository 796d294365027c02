"""The scales of two operands, broadcast to the one shape that the fast implementations multiply by."""

from jax import Array

from axon.kernels.quantized_matmul.quantize import Quantized, spread


def broadcast_scales(x: Quantized, w: Quantized) -> tuple[Array, Array]:
    """`rows blocks` and `blocks out`, for the blocks that scales cut the contracted dimension into; 1 if none does."""
    blocks = max(x.scales.shape[1], w.scales.shape[0])
    return spread(x.scales, x.values.shape[0], blocks), spread(w.scales, blocks, w.values.shape[1])
