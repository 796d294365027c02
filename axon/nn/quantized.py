"""Weights at rest in 8 bits, with a scale for each output, or in 4, with one for each block of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from axon.axes import Names, einsum
from axon.axes.patterns import Contraction
from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.quantized_matmul.quantize import rounded, scale_of
from axon.nn.four_bits import FourBits, FourBitWeight, not_drawn
from axon.nn.output_scales import scaled_product
from axon.nn.param import Param, ParamSpec
from axon.nn.weight_transform import Operand, Weight, WeightTransform, beside, untransformed
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns
from axon.precision.codebook import INT4, normal_float
from axon.precision.microscaling import E2M1_CODES

SCALE_DTYPE = jnp.bfloat16
"""Of scales: those of no more than its bits are exact in every compute dtype."""


FOUR_BITS = {
    "int4": FourBits(INT4, 128),
    "nf4": FourBits(normal_float(), 64, "dynamic8"),
    "mxfp4": FourBits(E2M1_CODES, 32, "e8m0"),
}


@dataclass(frozen=True)
class Quantize(WeightTransform):
    """Matrices in few bits, which do not train. By default embedding and head stay, and routers.

    Args:
        format: "int8" or "float8_e4m3fn": a `QuantizedWeight` each. "int4": integers with a scale for each 128 inputs
            of an output. "nf4": quantiles of a Gaussian with one for each 64, these in 8 bits (QLoRA, Dettmers et al.,
            arXiv:2305.14314); 4.13 bits a number. "mxfp4": e2m1 with a power of two for each 32 (OCP Microscaling
            Formats 1.0), 4.25 bits a number; by default experts' matrices alone, as gpt-oss is published.
        block: how many inputs share a scale in 4 bits, in place of these.
    """

    format: Literal["int8", "float8_e4m3fn", "int4", "nf4", "mxfp4"]
    paths: Patterns | None = None
    block: int | None = None

    def __post_init__(self):
        if self.block is None:
            return
        check_range(self, "[2, inf)", "block")
        if self.format not in FOUR_BITS:
            raise UserError(f"Quantize.block is of formats in 4 bits ({', '.join(FOUR_BITS)}), not of {self.format}")

    def fits(self, path: str, spec: ParamSpec) -> bool:
        is_default = self.format != "mxfp4" or "experts" in spec.own
        return super().fits(path, spec) and (self.paths is not None or is_default)

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        own = untransformed(weight, declared, self)
        if self.format in FOUR_BITS:
            form = FOUR_BITS[self.format]
            return FourBitWeight(own, spec, replace(form, block=self.block or form.block))
        return QuantizedWeight(own, spec, self.format)

    @property
    def text(self) -> str:
        return self.format


class QuantizedWeight(Operand):
    """A matrix W = values · scales: 8-bit `values` with W's axes, and `scales` with those that are its outputs.

    `x · W` is a product of `x`, in the compute dtype, with the values, which are converted as they are read, and the
    scales multiply what comes out. Activations are not rounded: what reads weights is bound by their bytes, and of
    activations a few are so large that 8 bits hurt (Dettmers et al., arXiv:2208.07339).

    Args:
        weight: the parameter that it is to stand for. spec: of it; there is a scale for each place along the axes that
            are not its inputs. dtype: of the values, int8 or float8_e4m3fn.
    """

    def __init__(self, weight: Param, spec: ParamSpec, dtype: Any):
        self.dtype = jnp.dtype(dtype)
        self.summed = tuple(i for i, name in enumerate(spec.axes) if i >= spec.stack and name in spec.inputs)
        outputs = tuple(name for name in weight.axes if name not in spec.inputs)
        untrained: Any = {"trained": False}
        self.values = beside(weight, weight.axes, not_drawn, dtype, decay=True, in_stack=weight.in_stack, **untrained)
        self.scales = beside(weight, outputs, not_drawn, SCALE_DTYPE, decay=False, **untrained)

    @property
    def axes(self) -> Names:
        return self.values.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """See `axon.axes.CompositeWeight`."""
        return scaled_product(contraction, x, self.scales, lambda inner, x: einsum(inner.text, x, self.values))

    def grouped(self, bias: Any) -> Matrix:
        return Matrix(self.values.get_value(), self.scales.get_value(), bias)

    def derived(self, value: Array) -> dict[str, Array]:
        return quantized(value, self.summed, self.dtype)

    def merged(self, values: Mapping[str, Array]) -> Array:
        return values["values"].astype(jnp.float32) * jnp.expand_dims(values["scales"], self.summed)


def quantized_format(weights: Any) -> Any:
    """The format of `Quantize` that weights stored so have; None for a dtype that needs no scales, and for None."""
    if weights is None or weights in FOUR_BITS:
        return weights
    dtype = jnp.dtype(weights)
    return dtype.name if dtype in map(jnp.dtype, EIGHT_BITS) else None


def quantized(value: Array, over: tuple[int, ...], dtype: Any) -> dict[str, Array]:
    """The `values` and `scales` of a `QuantizedWeight` for an array with the dimensions `over` summed."""
    wide = value.astype(jnp.float32)
    exact = scale_of(jnp.max(jnp.abs(wide), axis=over, keepdims=True), dtype)
    scales = (exact * (1 + 2**-8)).astype(SCALE_DTYPE)  # at least the exact one: rounding takes off 2⁻⁹ at most
    values = rounded(wide / scales.astype(jnp.float32), dtype)
    return {"values": values, "scales": jnp.squeeze(scales, over)}
