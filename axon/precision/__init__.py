"""Which dtype is used for what."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """The dtype policy. Parameters and the optimizer's state are float32 throughout.

    Args:
        compute: dtype of matmul operands, and so of a weight's gather (unless it is stored in a narrower one); "auto"
            is float32 on CPU, bfloat16 elsewhere.
        reduce: dtype in which a weight's gradient is accumulated, and summed over devices. (Gradients of several
            microbatches add up in the weight's own, before a sum over devices that waits for all of them. Those of
            norms and biases, which are few bytes, are summed in float32 with `Layout.auto`, and in a replica that
            trains by itself.)
    """

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    reduce: Literal["float32", "bfloat16"] = "float32"

    def compute_dtype(self, platform: str) -> jnp.dtype:
        """`compute` on a platform: `cpu`, `gpu` or `tpu`."""
        name = ("float32" if platform == "cpu" else "bfloat16") if self.compute == "auto" else self.compute
        return jnp.dtype(name)

    @property
    def reduce_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.reduce)
