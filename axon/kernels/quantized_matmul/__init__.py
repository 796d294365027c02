"""Quantised matmul: int8 or fp8 operands with scales, summed in 32 bits, by the implementation that fits."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.errors import UserError
from axon.kernels.choice import choose, off_gpu, with_gpu, with_tpu
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.quantized_matmul import gpu_support, tpu
from axon.kernels.quantized_matmul.quantize import (
    BLOCK,
    COLUMN,
    ROW,
    ROW_BLOCK,
    TENSOR,
    Granularity,
    KMajor,
    Quantized,
    dequantize,
    k_major,
    quantize,
)
from axon.kernels.quantized_matmul.reference import quantized_matmul_reference
from axon.kernels.quantized_matmul.tpu import quantized_matmul_tpu
from axon.kernels.quantized_matmul.xla import quantized_matmul_xla

__all__ = [
    "BLOCK",
    "COLUMN",
    "ROW",
    "ROW_BLOCK",
    "TENSOR",
    "Granularity",
    "KMajor",
    "Quantized",
    "dequantize",
    "k_major",
    "quantize",
    "quantized_matmul",
    "quantized_matmul_reference",
    "quantized_matmul_tpu",
    "quantized_matmul_xla",
]

_IMPLEMENTATIONS: dict[str, Callable[[Quantized, Quantized, Any], Array]] = {
    "tpu": quantized_matmul_tpu,
    "xla": quantized_matmul_xla,
    "reference": quantized_matmul_reference,
}


def quantized_matmul(x: Quantized, w: Quantized | KMajor, *, dtype: Any = jnp.bfloat16) -> Array:
    """`x · w` on one device's shard, of operands from `quantize`.

    Args:
        x: values `rows k`; scales `rows_or_blocks k_blocks`. w: values `k out`; scales `k_blocks out_or_blocks`; or
            the same with k contiguous, from `k_major`, as NVIDIA's 8-bit tensor cores read it.
            Numbers of scales divide those of values; along k both have as many, or one has 1.
        dtype: of the result.

    Returns: `rows out`. Products are summed in int32 (int8) or float32 (fp8), across blocks in float32.

    It has no gradient: rounding has none, and a surrogate is the caller's choice. Differentiating x or w raises
    `UserError`; with `jax.lax.stop_gradient` around them, other operands can be differentiated.

    Raises `UserError` for shapes or dtypes that do not match.
    """
    plain = w.transposed if isinstance(w, KMajor) else w
    _check(x, plain)
    chosen = choose("quantized_matmul", _candidates(x, w, dtype), _detail(x, plain))
    if chosen == "mosaic":
        return _without_gradient(lambda x, w: _mosaic().quantized_matmul_gpu(x, w, dtype))(x, w)
    return _without_gradient(lambda x, w: _IMPLEMENTATIONS[chosen](x, w, dtype))(x, plain)


def _detail(x: Quantized, w: Quantized) -> str:
    (rows, inner), out = x.values.shape, w.values.shape[1]
    return f"{rows} × {inner} by {out}, {x.values.dtype}, {x.scales.shape} and {w.scales.shape} scales"


def _candidates(x: Quantized, w: Quantized | KMajor, dtype: Any) -> dict[str, str | None]:
    """Implementation → why it cannot do this product, None if it can; the best first."""
    without_tpu = "w is stored `out k`, and it reads `k out`" if isinstance(w, KMajor) else tpu.unfit(x, w)
    others = with_tpu(without_tpu, {"xla": None, "reference": None})
    return with_gpu({"mosaic": _without_mosaic(x, w, dtype)}, others)


def _without_mosaic(x: Quantized, w: Quantized | KMajor, dtype: Any) -> str | None:
    """Why the Hopper kernel cannot do this product; None if it can."""
    return off_gpu(lambda chip: gpu_support.unsupported(x, w, dtype, chip))


def _mosaic() -> Any:
    """The Hopper kernel, imported where it runs: not every jax that Axon supports has what it needs."""
    return import_module("axon.kernels.quantized_matmul.gpu")


def _without_gradient(run: Callable[..., Array]) -> Callable[..., Array]:
    product = jax.custom_jvp(run)

    @product.defjvp
    def _(primals, tangents):
        raise UserError(
            "quantized_matmul has no gradient for its operands: put jax.lax.stop_gradient around them,"
            " or multiply in 16 bits where a gradient is wanted"
        )

    return product


def _check(x: Quantized, w: Quantized) -> None:
    if x.values.dtype != w.values.dtype or x.values.dtype not in EIGHT_BITS:
        raise UserError(
            f"quantized_matmul: both operands are int8 or float8_e4m3fn, not {x.values.dtype} and {w.values.dtype}"
        )
    for name, operand in (("x", x), ("w", w)):
        _check_scales(name, operand)
    if x.values.shape[1] != w.values.shape[0]:
        raise UserError(f"quantized_matmul: x has a k of {x.values.shape[1]}, w of {w.values.shape[0]}")
    along = x.scales.shape[1], w.scales.shape[0]
    if 1 not in along and along[0] != along[1]:
        raise UserError(f"quantized_matmul: along k there are {along[0]} scales of x and {along[1]} of w")


def _check_scales(name: str, operand: Quantized) -> None:
    values, scales = operand.values.shape, operand.scales.shape
    if (len(values), len(scales)) != (2, 2):
        raise UserError(f"quantized_matmul: {name} has values and scales of two dimensions, not {values} and {scales}")
    if any(blocks == 0 or size % blocks for size, blocks in zip(values, scales, strict=True)):
        raise UserError(f"quantized_matmul: {name} has scales {scales}, which do not divide its values {values}")
