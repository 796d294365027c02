"""Weights in 8 bits are near those that they stand for, and products with them are those of values times scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import base, einsum
from axon.layout import Layout
from axon.nn import Routing
from axon.nn.param import parameters
from axon.nn.quantized import Quantize, quantized
from axon.nn.weight_transform import transform_weights
from axon.runtime import Runtime
from models.deepseek import DeepSeek
from models.llama import Llama

DTYPES = ["int8", "float8_e4m3fn"]
LLAMA = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
DEEPSEEK = DeepSeek(
    64, 16, layers=2, first_dense=1, heads=4, mlp=24, expert_mlp=8, shared=8, q_latent=8, kv_latent=6, nope_dim=6,
    rope_dim=4, value_dim=8, routing=Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1),
)  # fmt: skip


def in_8_bits(w, spec, dtype):
    """The parts of a weight, as NumPy's arrays."""
    over = tuple(i for i, name in enumerate(spec.axes) if i >= spec.stack and name in spec.inputs)
    return jax.device_get(jax.jit(lambda w: quantized(w, over, jnp.dtype(dtype)))(np.float32(w)))


def dequantized(parts, spec):
    """Of the parts of a weight the array that they stand for, and its scales, with as many dimensions."""
    over = [i for i, name in enumerate(spec.axes) if i >= spec.stack and name in spec.inputs]
    scales = np.expand_dims(np.asarray(parts["scales"], np.float64), tuple(over))
    return np.asarray(parts["values"], np.float64) * scales, scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_within_half_a_step_of_what_it_stands_for_and_each_output_has_a_scale(dtype, rng):
    for path, spec in parameters(LLAMA.build()).items():
        if not path.startswith("layers") or len(spec.own) == 1:
            continue
        w = rng.normal(0, 10.0 ** rng.uniform(-3, 3, spec.shape[-1]), spec.shape).astype(np.float32)
        w[0] *= rng.random() > 0.5  # a layer of zeros, as of padding, is one
        parts = in_8_bits(w, spec, dtype)
        found, scales = dequantized(parts, spec)
        kept = [n not in spec.inputs for n in spec.axes]
        assert parts["scales"].shape == tuple(np.array(spec.shape)[kept])
        step = scales / 2 if dtype == "int8" else np.maximum(np.abs(w) / 16, scales / 1024)
        assert np.all(np.abs(found - w) <= step * (1 + 1e-6))


@pytest.mark.parametrize(
    "pattern",
    [
        "batch seq kv_latent, kv_latent heads nope_dim -> batch seq heads nope_dim",
        "batch seq heads nope_dim, kv_latent heads nope_dim -> batch seq heads kv_latent",
        "batch seq heads, kv_latent heads nope_dim -> batch seq kv_latent nope_dim",
    ],
)
def test_a_product_is_that_of_values_times_scales_over_inputs_and_over_outputs(pattern, rng):
    module = DEEPSEEK.build()
    spec = parameters(module)["layers/dense/attention/key"]
    transform_weights(module, [Quantize("int8")])
    weight = module.layers.dense.attention.key
    parts = in_8_bits(rng.normal(size=spec.shape), spec, "int8")
    weight.values.set_value(jnp.asarray(parts["values"][0]))
    weight.scales.set_value(jnp.asarray(np.float32(parts["scales"][0])))
    sizes = {"batch": 2, "seq": 3} | dict(zip(map(base, spec.own), spec.shape[1:], strict=True))
    x = rng.normal(size=[sizes[name] for name in pattern.partition(",")[0].split()]).astype(np.float32)
    names = {"batch": "b", "seq": "s", "kv_latent": "k", "heads": "h", "nope_dim": "n"}
    letters = pattern.replace(" -> ", ">")
    for name, letter in names.items():
        letters = letters.replace(name, letter)
    plain = np.einsum(letters.replace(" ", "").replace(">", "->"), x, dequantized(parts, spec)[0][0])
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda x: einsum(pattern, x, weight))(x)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)


def test_all_matrices_of_blocks_are_in_8_bits_but_routers():
    module = DEEPSEEK.build()
    before, found = parameters(module), transform_weights(module, [Quantize("int8")])
    kept = {path for path in before if path not in found}
    assert all(path.partition("/")[0] != "layers" or "norm" in path or "/moe/" in path for path in kept)
    assert {p.rpartition("/")[2] for p in kept if "/moe/" in p} == {"matrix"}
    matrices = {f"layers/experts/moe/{of}{name}" for of in ("", "shared/") for name in ("gate", "up", "down")}
    assert {p for p in found if "/moe/" in p} == matrices


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
def test_a_runtime_in_8_bits_declares_values_and_scales_and_counts_the_same_flops(model):
    wide, narrow = (Runtime(model, Layout(), weights=dtype) for dtype in (jnp.bfloat16, jnp.int8))
    assert narrow.module.flops_per_token(32) == wide.module.flops_per_token(32)
    for path, spec in ((path, narrow.declared[path]) for path in narrow.operands):
        values, scales = (narrow.parameters[f"{path}/{name}"] for name in ("values", "scales"))
        assert (values.axes, values.shape, values.dtype) == (spec.axes, spec.shape, jnp.int8)
        assert scales.axes == tuple(name for name in spec.axes if name not in spec.inputs)
    assert "int8: " in narrow.choices["weights"]
    assert "embedding/table, head" in narrow.choices["weights"]
