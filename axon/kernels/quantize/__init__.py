"""An array in 8 bits with a scale for all along some of its axes, found and rounded by in one pass over it.

The formula in two passes, which XLA carries out, is that of `axon.precision.formats`.
"""

from axon.kernels.quantize.tpu import quantize_tpu, unfit

__all__ = ["quantize_tpu", "unfit"]
