"""The Hopper kernel of the quantised product: interpreted against the reference, and as it compiles for an H200."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.kernels.quantized_matmul import (
    BLOCK,
    COLUMN,
    ROW,
    ROW_BLOCK,
    TENSOR,
    Granularity,
    KMajor,
    Quantized,
    k_major,
    quantize,
    quantized_matmul,
)
from axon.kernels.quantized_matmul.gpu_support import unsupported
from axon.plan.flops import count_flops
from scripts.bench.gpu_cases.quantized_matmul import gpu_cases

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")

CASES = gpu_cases()
H200 = "NVIDIA H200 141GB HBM3e"
FP8 = "float8_e4m3fn"


@pytest.fixture
def worst(run_script):
    """worst(seed, dtype, pair, shape, …): the largest error, as a share of its bound."""

    def run(seed, dtype, pair, shape=(128, 256, 256), out="float32", blocks=2):
        case = {"seed": seed, "dtype": dtype, "granularities": pair, "shape": shape, "out": out, "blocks": blocks}
        return run_script(Path(__file__).with_name("interpreted_gpu.py"), case)

    return run


@pytest.mark.full
def test_a_product_in_blocks_is_that_of_the_reference(seed, worst):
    assert worst(seed, FP8, (ROW_BLOCK, BLOCK)) < 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "pair", "more"),
    [
        (FP8, (ROW, COLUMN), {"shape": (128, 768, 128)}),  # more steps than are in flight
        (FP8, (TENSOR, TENSOR), {"shape": (150, 256, 256), "out": "bfloat16", "blocks": 1}),  # tile after tile
        (FP8, (ROW_BLOCK, COLUMN), {}),
        (FP8, (Granularity(1, 256), Granularity(256, 256)), {"shape": (70, 512, 256)}),
        ("int8", (ROW, COLUMN), {"shape": (128, 512, 128)}),
        ("int8", (ROW_BLOCK, BLOCK), {"shape": (300, 256, 384)}),
    ],
    ids=str,
)
def test_products_are_those_of_the_reference_whatever_the_scales_and_nothing_races(dtype, pair, more, seed, worst):
    assert worst(seed, dtype, pair, **more) < 1


def test_a_weight_with_k_contiguous_gives_the_product_of_the_other(rng):
    @jax.jit
    def ours_and_theirs(x, w):
        x, w = quantize(x, jnp.int8, ROW), quantize(w, jnp.int8, COLUMN)
        return [quantized_matmul(x, weight, dtype=jnp.float32) for weight in (k_major(w), w)]

    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 256), (256, 128)))
    np.testing.assert_array_equal(*ours_and_theirs(x, w))


def operands(rows=128, inner=256, out=256, x_blocks=1, w_scales=(1, 1), dtype=jnp.float8_e4m3fn):
    shape: Any = jax.ShapeDtypeStruct
    x = Quantized(shape((rows, inner), dtype), shape((rows, x_blocks), jnp.float32))
    return x, KMajor(shape((out, inner), dtype), shape(w_scales, jnp.float32))


@pytest.mark.parametrize(
    ("reason", "sizes", "chip"),
    [
        (None, {}, H200),
        (None, {"x_blocks": 2, "w_scales": (2, 2)}, H200),
        ("this is NVIDIA A100", {}, "NVIDIA A100-SXM4-80GB"),
        ("8 rows would leave", {"rows": 8}, H200),
        ("multiples of 128, not 200 and 256", {"inner": 200}, H200),
        ("multiples of 128, not 64", {"x_blocks": 4}, H200),
        ("128 along out, not 1", {"w_scales": (256, 2)}, H200),
        ("a sum of 262144 products", {"inner": 2**18, "dtype": jnp.int8}, H200),
        (None, {"inner": 2**18}, H200),
    ],
)
def test_what_the_kernel_lacks_is_said(reason, sizes, chip):
    said = unsupported(*operands(**sizes), jnp.bfloat16, chip)
    assert said is None if reason is None else reason in (said or "")
    assert "not int8" in (unsupported(*operands(), jnp.int8, H200) or "")


def chosen(requested, x, w, platform="gpu"):
    """The program that the product traces to, and what is logged of the choice."""
    placement: Any = SimpleNamespace(platform=platform, chip=H200)
    scope = axes.Scope(
        placement, execution=axes.Execution(kernels={"quantized_matmul": requested} if requested else {})
    )
    with axes.activate(scope):
        return str(jax.make_jaxpr(lambda x, w: quantized_matmul(x, w))(x, w)), scope.choices["quantized_matmul"]


def test_it_runs_where_it_fits_and_may_be_turned_off():
    x, w = operands()
    for requested in (None, "mosaic"):
        program, choice = chosen(requested, x, w)
        assert "axon_quantized_matmul" in program
        assert choice.startswith("mosaic, 128 × 256 by 256, float8_e4m3fn")
    assert "axon_quantized_matmul" not in chosen("xla", x, w)[0]
    lacking = (x, Quantized(w.values, w.scales), "gpu", r"store k_major\(w\)"), (x, w, "tpu", "for a tpu")
    for left, right, platform, reason in lacking:
        with pytest.raises(UserError, match=f"'mosaic' is unavailable for quantized_matmul: .*{reason}"):
            chosen("mosaic", left, right, platform)


def test_a_weight_that_the_kernel_for_tpus_would_have_to_copy_takes_xla_and_says_why():
    assert "(not tpu: w is stored `out k`" in chosen(None, *operands(), platform="tpu")[1]


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_program_with_it_counts_its_products(case):
    count = count_flops(case.function, *case.operands)
    assert (count.flops, count.uncounted) == (case.cost.flops, ())


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_compiles_with_nothing_spilled_and_no_wgmma_serialised(case, check_compiled):
    check_compiled(case, "axon_quantized_matmul")
