"""Products by a recipe, beside the formula in float64: forward and both gradients; and what each rounds."""

import math
import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import P

from axon.axes import einsum
from axon.chips import CHIPS
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn import Param
from axon.nn.low_precision import LowPrecision
from axon.plan.report import compile_step
from axon.plan.topology import devices
from axon.precision import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed, Int8, Precision, operation
from axon.precision.product import _joined
from axon.runtime import Runtime
from axon.train.optimizers import SGD, Constant
from axon.train.step import Program
from models.llama import Llama

RECIPES = {
    "int8": Int8(emulate=True, paths="weight"),
    "tensor": FP8Current(emulate=True, paths="weight"),
    "row": FP8Current(share="row", emulate=True, paths="weight"),
    "block": FP8Block(emulate=True, paths="weight"),
    "mx": MXFP8(emulate=True, paths="weight"),
    "nvfp4": NVFP4(emulate=True, paths="weight"),
}
BOUNDS = {"int8": 2**-6, "tensor": 2**-3, "row": 2**-3, "block": 2**-4, "mx": 2**-3.5, "nvfp4": 2**-2}
"""Of an error's norm beside that of the product: a few of the format's roundings."""

MODEL = Llama(vocab=256, embed=512, layers=2, heads=4, kv_heads=4, mlp=1024)
PATTERN = "batch seq heads head_dim, heads head_dim embed -> batch seq embed"
SIZES = {"heads": 4, "head_dim": 64, "embed": 256}
LAYOUTS = Layout({"data": 2, "tensor": 2}, zero=3), Layout({"data": 2, "context": 2}, zero=3)
SHAPE, OUT = (4, 128, 4, 64), (4, 128, 256)


class Holder(nnx.Module):
    def __init__(self):
        self.weight = Param("heads head_dim embed", SIZES)

    def __call__(self, x):
        return einsum(PATTERN, x, self.weight)


class Built:
    def build(self):
        return Holder()


def product(recipe, layout, x, w, dy, **variables):
    """The product and its gradients for `x` and `w`, on a layout."""
    count = int(np.prod([*layout.mesh.values()]))
    runtime = Runtime(Built(), layout, transforms=[LowPrecision(recipe)], devices=jax.devices()[:count])
    spec = runtime.parameters["weight/base"]
    with runtime.tracing():
        value = jax.device_put(w, runtime.placement.sharding(spec.axes, spec.kind))
        x, dy = (
            jax.device_put(a, runtime.placement.sharding(("batch", "seq", *rest)))
            for a, rest in ((x, ("heads", "head_dim")), (dy, ("embed",)))
        )

        def run(x, w):
            return runtime.bind({"weight": {"base": w}}, {"weight": variables} if variables else None)(x)

        y = runtime.jit(run)(x, value)
        dx, dw = runtime.jit(lambda x, w, dy: jax.vjp(run, x, w)[1](dy))(x, value, dy)
    return tuple(np.asarray(one, np.float64) for one in (y, dx, dw))


@pytest.fixture
def operands(rng):
    scales = 10.0 ** rng.uniform(-2, 2, (4, 1, 1, 1))
    x = rng.normal(size=SHAPE) * scales
    return tuple(one.astype(np.float32) for one in (x, rng.normal(size=[*SIZES.values()]), rng.normal(size=OUT)))


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_float64_within_the_formats_rounding(name, operands):
    x, w, dy = (one.astype(np.float64) for one in operands)
    exact = np.einsum("bshd,hde->bse", x, w), np.einsum("bse,hde->bshd", dy, w), np.einsum("bshd,bse->hde", x, dy)
    for actual, expected in zip(product(RECIPES[name], Layout({"data": 1}), *operands), exact, strict=True):
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert 0 < error < BOUNDS[name]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "context"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_layout_rounds_alike(name, layout, operands):
    one = product(RECIPES[name], Layout({"data": 1}), *operands)
    for actual, expected in zip(product(RECIPES[name], layout, *operands), one, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("spec", [P("data", None, "tensor"), P("data", "tensor"), P(("data", "tensor"))], ids=str)
def test_values_and_scales_are_bit_for_bit_those_of_one_device(name, spec, placed, compiled, rng):
    names, summed = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "embed")
    x = (rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-4, 4, (*SHAPE[:2], 1, 1))).astype(np.float32)
    form, spec = RECIPES[name].products.forward[0], P(*spec, *(None,) * (4 - len(spec)))

    def run(placement, here):
        moved = jax.device_put(x, jax.NamedSharding(placement.mesh, here))
        return compiled(placement, lambda x: tuple(operation.rounded(x, names, form, summed, here, here).array), moved)

    for one, expected in zip(run(placed({"data": 2, "tensor": 2}), spec), run(placed(), P(*4 * (None,))), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("name", ["int8", "tensor", "row"])
def test_products_of_8_bits_are_the_emulated_ones(name, operands):
    layout, recipe = Layout({"data": 2, "tensor": 2}, zero=3), RECIPES[name]
    actual = product(replace(recipe, emulate=False), layout, *operands)
    for one, expected in zip(actual, product(recipe, layout, *operands), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_axes_that_are_summed_together_are_joined_where_they_are_neighbours_in_one_order(rng):
    out = ("batch", "seq", "embed")
    x, w = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(4, 5, 6))
    (a, a_names), (b, b_names) = _joined(
        x, ("batch", "seq", "heads", "head_dim"), w, ("heads", "head_dim", "embed"), out
    )
    assert (a_names, b_names) == (("batch", "seq", "heads head_dim"), ("heads head_dim", "embed"))
    np.testing.assert_allclose(a @ b, np.einsum("bshd,hde->bse", x, w))
    turned = _joined(x, ("batch", "seq", "heads", "head_dim"), w.swapaxes(0, 1), ("head_dim", "heads", "embed"), out)
    assert [one.ndim for one, _ in turned] == [4, 3]
    one = _joined(
        x, ("batch", "seq", "heads", "embed"), w, ("embed", "mlp", "out"), ("batch", "seq", "heads", "mlp", "out")
    )
    assert [part.ndim for part, _ in one] == [4, 3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "count", "recipe", "value", "sum_"),
    [("v6e:2x2", 4, Int8(), "s8", "s32"), ("tpu7x:2x2x1", 8, FP8Current(), "f8e4m3fn", "f32")],
)
def test_a_chip_multiplies_and_gathers_in_8_bits(target, count, recipe, value, sum_):
    """Of 7 matrices of a block each is gathered so, and multiplied in the forward and for both gradients."""
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    options = {"batch": 8, "seq": 256, "precision": Precision(recipe=recipe), "devices": devices(target)}
    program = Program(MODEL, Layout({"data": count}, zero=3), SGD(Constant(0.1)), **options)
    _, text = compile_step(program, target)
    gathered = re.findall(rf"= {value}\[[0-9,]*\]\S* all-gather", text)
    summed = re.findall(rf"= {sum_}\[[0-9,]*\]\S* convolution", text)
    assert len(gathered) >= 7
    assert len(summed) >= 3 * 7


@pytest.mark.full
@pytest.mark.draws(1)
def test_scales_that_are_powers_of_two_are_gathered_in_a_byte():
    """32 numbers in 33 bytes, 0.516 of bfloat16's: those of all matrices, in both passes. A CPU widens e4m3 to 16 bits,
    so numbers are counted."""
    model, precision = Llama(vocab=64, embed=128, layers=1, heads=2, kv_heads=2, mlp=256), Precision("bfloat16")
    options = {"batch": 4, "seq": 32, "precision": replace(precision, recipe=MXFP8(emulate=True))}
    program = Program(model, Layout({"data": 4}, zero=3), SGD(Constant(0.1)), devices=jax.devices()[:4], **options)
    gathered = re.findall(r"= (\w+)\[([0-9,]+)\]\S* all-gather", program.lower().compile().as_text())
    sizes = [(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in gathered]
    values, scales = (sum(size for one, size in sizes if one == dtype) for dtype in ("f16", "u8"))
    assert values >= 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert scales == values // 32
    assert max(size for dtype, size in sizes if dtype == "f32") == 64 * 128, "the head alone"


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "products"), [(Int8(), 3), (FP8Current(share="row"), 1)], ids=["int8", "fp8"])
def test_on_hopper_products_of_one_dtype_are_our_kernel_s_unless_it_is_turned_off(recipe, products):
    """Of 7 matrices of a block; of FP8 the forward, since its gradients are of two dtypes."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    options = {"batch": 2, "seq": 256, "precision": Precision(recipe=recipe), "devices": devices("h200:1")}
    own, others = (
        Program(MODEL, Layout(), SGD(Constant(0.1)), execution=Execution(kernels=kernels), **options)
        for kernels in ({}, {"quantized_matmul": "xla"})
    )
    assert "axon_quantized_matmul" not in str(others.trace().jaxpr)
    assert str(own.trace().jaxpr).count("name=axon_quantized_matmul") == 7 * products
    assert own.choices["XLA options"] == "xla_gpu_enable_triton_gemm=False"
    assert own.choices["quantized_matmul"].count("mosaic, ") == len(own.choices["quantized_matmul"].split("; also "))
    kernels = compile_step(own, "h200:1")[0].kernels
    assert kernels["axon_quantized_matmul"] == 7 * 2 * products


@pytest.mark.full
def test_on_hopper_blocks_are_multiplied_by_our_kernel_but_for_the_weights_gradient():
    """Of 7 matrices of each of two layers; two operands of 1 × 128 are multiplied in bfloat16."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    options = {"batch": 2, "seq": 256, "precision": Precision(recipe=FP8Block()), "devices": devices("h200:1")}
    program = Program(MODEL, Layout(), SGD(Constant(0.1)), **options)
    kernels = compile_step(program, "h200:1")[0].kernels
    assert kernels["axon_quantized_matmul"] == 7 * 2 * 2
    assert "xla" not in program.choices["quantized_matmul"]


def test_blocks_are_refused_where_no_kernel_has_them():
    with pytest.raises(UserError, match=r"(?s)fp8 in blocks of 128.*tpu7x.*h200.*FP8Block\.emulate"):
        FP8Block().check_chip(CHIPS["tpu7x"], "tpu7x")
    with pytest.raises(UserError, match=r"NVFP4.*fp4 in blocks of 16.*NVFP4\.emulate"):
        NVFP4().check_chip(CHIPS["b200"], "b200")


@pytest.mark.parametrize(("most_recent", "margin"), [(False, 0), (True, 0), (False, 2)])
@pytest.mark.parametrize("layout", [Layout({"data": 1}), Layout({"data": 2, "tensor": 2}, zero=3)], ids=str)
def test_delayed_scales_follow_the_recorded_magnitudes_and_their_own_where_there_are_none(
    layout, most_recent, margin, operands, rng
):
    recipe = FP8Delayed(history=3, most_recent=most_recent, margin=margin, emulate=True, paths="weight")
    recorded = rng.uniform(0.5, 3, (3, 3)).astype(np.float32)
    recorded[2] = 0
    most = (recorded[:, 0] if most_recent else recorded.max(1)) * 2**margin
    x, w, dy = operands
    x8, w8 = (rounded(one, amax, ml_dtypes.float8_e4m3fn) for one, amax in ((x, most[0]), (w, most[1])))
    dy8 = rounded(dy, np.abs(dy).max((1, 2), keepdims=True), ml_dtypes.float8_e5m2)
    expected = np.einsum("bshd,hde->bse", x8, w8), np.einsum("bse,hde->bshd", dy8, w8)
    expected = *expected, np.einsum("bshd,bse->hde", x8, dy8)
    for actual, one in zip(product(recipe, layout, *operands, amax=recorded), expected, strict=True):
        np.testing.assert_allclose(actual, one, atol=1e-5 * np.abs(one).max())


def rounded(x, amax, dtype):
    """`x` in a dtype, float64, scaled by largest magnitudes."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.asarray(amax, np.float32) * np.float32(1 / float(largest))
    return np.clip(x * (np.float32(1) / scale), -largest, largest).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("bad", [{"history": 0}, {"margin": -1}])
def test_a_history_and_a_margin_that_cannot_be_are_refused_by_name(bad):
    with pytest.raises(UserError, match=rf"FP8Delayed.{next(iter(bad))}"):
        FP8Delayed(**bad)
