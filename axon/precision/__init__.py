"""Which dtype is used for what: a policy, and recipes for products in 8 bits."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from axon.errors import UserError
from axon.layout import Placement
from axon.precision.loss_scale import LossScale
from axon.precision.recipe import Recipe
from axon.precision.recipes import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Int8

__all__ = ["MXFP8", "NVFP4", "FP8Block", "FP8Current", "FP8Delayed", "Int8", "LossScale", "Precision", "Recipe"]


@dataclass(frozen=True)
class Precision:
    """The dtype policy. An optimizer says itself how its moments are kept (`AdamW.moments`).

    Args:
        compute: dtype of matmul operands, and so of a weight's gather (unless it is stored in a narrower one); "auto"
            is float32 on CPU, bfloat16 elsewhere.
        reduce: dtype in which a weight's gradient is accumulated, and summed over devices. (Gradients of several
            microbatches add up in the weight's own, before a sum over devices that waits for all of them. Those of
            norms and biases, which are few bytes, are summed in float32 with `Layout.auto`, and in a replica that
            trains by itself.)
        parameters: dtype in which parameters that are declared as float32 are stored, trained and saved; in bfloat16
            steps are rounded stochastically by every optimizer but `Optax`, `ScheduleFreeAdamW` and `OneBitAdam`, which
            round to nearest, and gradients are added up over microbatches in it.
        recipe: formats of few bits for the products of blocks' matrices in training, as `Int8()`; None:
            in `compute`. Evaluation beside training has it too; what is exported, served or sampled is a plain model.
        loss_scale: of gradients in float16, as `LossScale()`; None in all else.
    """

    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    reduce: Literal["float32", "bfloat16"] = "float32"
    parameters: Literal["float32", "bfloat16"] = "float32"
    recipe: Recipe | None = None
    loss_scale: LossScale | None = None

    def check_training(self, placement: Placement) -> None:
        """Raise `UserError` for what a mesh cannot train in."""
        if self.recipe is not None:
            self.recipe.check(placement)
        if (self.compute == "float16") == (self.loss_scale is not None):
            return
        raise UserError(
            f"Precision.compute = {self.compute!r} and Precision.loss_scale = {self.loss_scale}: gradients in float16 "
            "alone vanish or overflow unless their loss is scaled. Set Precision.loss_scale = @LossScale() with "
            "'float16', None with all else"
        )

    def compute_dtype(self, platform: str) -> jnp.dtype:
        """`compute` on a platform: `cpu`, `gpu` or `tpu`."""
        name = ("float32" if platform == "cpu" else "bfloat16") if self.compute == "auto" else self.compute
        return jnp.dtype(name)

    @property
    def reduce_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.reduce)
