"""The recipes that a config names."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from jax import Array

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.attention import FP8Products
from axon.precision.formats import E2M1, E4M3, E8M0, Format
from axon.precision.recipe import Products, Recipe

E5M2 = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Int8(Recipe):
    """int8 × int8 → int32 in all three products, as TPU v5e and v6e have it at twice the speed of bfloat16.

    A scale for each token of `x` and `dy`, and for each output of `w`; in the weight's gradient for each output of `dy`
    in each sequence (SwitchBack, Wortsman et al., arXiv:2304.13013, leaves that product in 16 bits).
    """

    @property
    def products(self) -> Products:
        row = Format("int8", "row")
        return Products((row, row), (row, None), (None, row))


@dataclass(frozen=True, kw_only=True)
class FP8Current(Recipe):
    """e4m3 values in the forward, e5m2 of gradients, with scales that follow from the operand at hand (Micikevicius et
    al., arXiv:2209.05433).

    Args:
        share: who shares a scale: all of a weight, and of a sequence ("tensor"); or each token, and each output of a
            weight ("row").
        attention: both products of attention's forward are made in e4m3 too, with scales of blocks of queries and keys
            (FlashAttention-3, arXiv:2407.08608, section 3.3); those of its backward stay in `Precision.compute`.
    """

    share: Literal["tensor", "row"] = "tensor"
    attention: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.attention and self.ends_text:
            raise UserError(
                f"FP8Current.attention and {self.ends_text} cannot be combined: attention has no weight that says of "
                "which layer it is. Leave one of them out"
            )

    @property
    def attention_products(self) -> FP8Products | None:
        return FP8Products(self.emulate) if self.attention else None

    @property
    def products(self) -> Products:
        forward, gradient = Format(E4M3, self.share), Format(E5M2, self.share)
        return Products((forward, forward), (gradient, None), (None, gradient))


@dataclass(frozen=True, kw_only=True)
class FP8Delayed(Recipe):
    """As `FP8Current` with a scale for all of an operand, which follows from the largest magnitudes of steps before:
    what is beyond them is limited, and no sum over devices is waited for (NVIDIA, Transformer Engine, "delayed
    scaling").

    An operand of which nothing is recorded yet, or zeros alone, has the scales that `FP8Current` gives it.

    Args:
        history: of how many steps largest magnitudes are kept. most_recent: take the last step's, not the largest.
        margin: how many times a scale is doubled, for values that may come.
    """

    history: int = 16
    most_recent: bool = False
    margin: int = 0

    takes_experts: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[1, 65536)", "history")
        check_range(self, "[0, 64)", "margin")

    @property
    def products(self) -> Products:
        forward, gradient = Format(E4M3), Format(E5M2)
        return Products((forward, forward), (gradient, forward), (forward, gradient))

    @property
    def recorded_steps(self) -> int:
        return self.history

    def magnitudes(self, recorded: Array) -> Array:
        largest = recorded[..., 0] if self.most_recent else super().magnitudes(recorded)
        return largest * 2.0**self.margin


@dataclass(frozen=True, kw_only=True)
class FP8Block(Recipe):
    """e4m3 values in blocks: 1 × 128 of activations and their gradients, along what is summed, and 128 × 128 of weights
    (DeepSeek-V3, arXiv:2412.19437, section 3.3). Products of blocks are scaled and added up in float32."""

    @property
    def products(self) -> Products:
        block, square = Format(E4M3, 128), Format(E4M3, 128, tile=128)
        return Products((block, square), (block, square), (block, block))


@dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """e4m3 values in blocks of 32 along what is summed, with a power of two each (OCP Microscaling Formats 1.0;
    Mishra et al., arXiv:2506.08027)."""

    @property
    def products(self) -> Products:
        block = Format(E4M3, 32, scale_dtype=E8M0)
        return Products((block, block), (block, block), (block, block))


@dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """e2m1 values in blocks of 16 along what is summed, 16 × 16 of weights, with scales in e4m3 and one of theirs
    (NVIDIA, arXiv:2509.25149): gradients are rounded stochastically, and both operands of the weight's gradient are
    mixed by a random Hadamard transform. Experts' matrices stay as they are.

    The paper keeps blocks at both ends in 16 bits: of 62 the `first` 2 and the `last` 8.
    """

    takes_experts: ClassVar[bool] = False

    @property
    def products(self) -> Products:
        block = Format(E2M1, 16, scale_dtype=E4M3)
        square, gradient = replace(block, tile=16), replace(block, stochastic=True)
        mixed = replace(block, hadamard=True), replace(gradient, hadamard=True)
        return Products((block, square), (gradient, square), mixed)
