"""Weights of the hub in few bits, beside what their formats' definitions say, written out element by element."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.quantized import QuantizedWeights, is_read, method_of
from axon.errors import UserError

OUT, IN, GROUP = 16, 64, 32
NAME = "model.layers.0.mlp.up_proj"


def opened(folder, parts, config):
    plain = {"model.norm.weight": np.ones(OUT, np.float32)}
    save_file(
        plain | {f"{NAME}{part}": np.ascontiguousarray(x) for part, x in parts.items()}, folder / "model.safetensors"
    )
    assert is_read(config)
    return QuantizedWeights(folder, config)


def check(weights, expected):
    assert weights.shapes == {"model.norm.weight": (OUT,), f"{NAME}.weight": expected.shape}
    assert weights.item_size(f"{NAME}.weight") == 4
    assert weights.dtypes == {"model.norm.weight": "F32", f"{NAME}.weight": "F32"}
    where = (slice(3, 11), slice(8, 40))
    np.testing.assert_allclose(weights.read(f"{NAME}.weight", where), expected[where], rtol=1e-6)
    np.testing.assert_array_equal(weights.read("model.norm.weight", (slice(0, 4),)), np.ones(4))


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_codes_are_looked_up_and_scaled_by_block(nested, rng, tmp_path):
    codes, table = rng.integers(0, 16, OUT * IN), rng.normal(size=16).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 32, "shape": [OUT, IN], "dtype": "bfloat16"}
    absmax = rng.random(OUT * IN // 32).astype(np.float32)
    parts = {}
    if nested:
        state |= {"nested_blocksize": 8, "nested_offset": 0.25, "nested_dtype": "float32"}
        scales, coarse = (
            rng.integers(0, 256, absmax.size, dtype=np.uint8),
            rng.random(absmax.size // 8).astype(np.float32),
        )
        numbers = np.sort(rng.normal(size=256)).astype(np.float32)
        absmax = np.array([numbers[s] * coarse[i // 8] + 0.25 for i, s in enumerate(scales)])
        parts = {".weight.nested_absmax": coarse, ".weight.nested_quant_map": numbers}
    parts |= {
        ".weight": np.uint8([[16 * first + second] for first, second in codes.reshape(-1, 2)]),
        ".weight.absmax": scales if nested else absmax,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    expected = np.array([table[code] * absmax[i // 32] for i, code in enumerate(codes)]).reshape(OUT, IN)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    check(opened(tmp_path, parts, config), expected)


def packed(rows, bits, order):
    """Each row's codes in integers of 32 bits, code `order[k]` of each in its k-th bits from below."""
    each = 32 // bits
    words = [
        [sum(int(row[i + order[k]]) << (bits * k) for k in range(each)) for i in range(0, len(row), each)]
        for row in rows
    ]
    return np.array(words, np.uint32).view(np.int32)


def gptq(rng, bits, version, group):
    """The parts of a weight whose inputs are in these groups, without `g_idx`; and what they stand for."""
    groups = max(group) + 1
    codes, zeros = rng.integers(0, 2**bits, (IN, OUT)), rng.integers(1, 2**bits, (groups, OUT))
    scales = rng.random((groups, OUT)).astype(np.float16)
    stored, order = zeros if version == "gptq_v2" else zeros - 1, range(32 // bits)
    parts = {
        ".qweight": packed(codes.T, bits, order).T,
        ".qzeros": packed(stored, bits, order),
        ".scales": scales,
    }
    expected = np.empty((OUT, IN), np.float32)
    for o in range(OUT):
        for i in range(IN):
            expected[o, i] = (codes[i, o] - zeros[group[i], o]) * np.float32(scales[group[i], o])
    return parts, expected


@pytest.mark.parametrize(("bits", "version"), [(4, "gptq"), (8, "gptq"), (4, "gptq_v2")])
def test_gptq_codes_lie_along_the_inputs_and_groups_may_be_in_any_order(bits, version, rng, tmp_path):
    group = rng.permutation(np.arange(IN) // GROUP)
    parts, expected = gptq(rng, bits, version, group)
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version, "desc_act": True}
    check(opened(tmp_path, parts | {".g_idx": group.astype(np.int32)}, config), expected)


@pytest.mark.parametrize("size", [GROUP, 24, -1])
def test_gptq_groups_are_neighbours_where_none_are_named(size, rng, tmp_path):
    parts, expected = gptq(rng, 4, "gptq", np.arange(IN) // (IN if size == -1 else size))
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False}
    check(opened(tmp_path, parts, config), expected)


def test_gptq_groups_in_no_order_must_be_named(rng, tmp_path):
    parts, _ = gptq(rng, 4, "gptq", np.arange(IN) // GROUP)
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
    with pytest.raises(CheckpointError, match=rf"{NAME}.*g_idx.*desc_act"):
        opened(tmp_path, parts, config).read(f"{NAME}.weight", (slice(None), slice(None)))


def test_awq_codes_lie_along_the_outputs_in_an_order_of_their_own(rng, tmp_path):
    codes, zeros = rng.integers(0, 16, (IN, OUT)), rng.integers(0, 16, (IN // GROUP, OUT))
    scales, order = rng.random((IN // GROUP, OUT)).astype(np.float16), (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {".qweight": packed(codes, 4, order), ".qzeros": packed(zeros, 4, order), ".scales": scales}
    expected = np.empty((OUT, IN), np.float32)
    for o in range(OUT):
        for i in range(IN):
            expected[o, i] = (codes[i, o] - zeros[i // GROUP, o]) * np.float32(scales[i // GROUP, o])
    check(opened(tmp_path, parts, {"quant_method": "awq", "bits": 4, "group_size": GROUP}), expected)


def test_fp8_values_are_scaled_by_blocks_of_which_the_last_are_cut(rng, tmp_path):
    values = rng.normal(size=(OUT, IN)).astype(jnp.float8_e4m3fn)
    scales = rng.random((2, 3)).astype(np.float32)
    expected = np.array([[np.float32(values[o, i]) * scales[o // 12, i // 24] for i in range(IN)] for o in range(OUT)])
    config = {"quant_method": "fp8", "weight_block_size": [12, 24]}
    check(opened(tmp_path, {".weight": values, ".weight_scale_inv": scales}, config), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_without_blocks_has_one_scale(shape, rng, tmp_path):
    values, scale = rng.normal(size=(OUT, IN)).astype(jnp.float8_e4m3fn), np.float32(rng.random(shape))
    parts = {".weight": values, ".weight_scale_inv": np.asarray(scale)}
    config = {"quant_method": "fp8", "weight_block_size": None}
    check(opened(tmp_path, parts, config), values.astype(np.float32) * np.float32(scale.reshape(-1)[0]))


def test_fp8_has_blocks_of_128_where_none_are_said(rng, tmp_path):
    values, scales = np.ones((OUT, 192), jnp.float8_e4m3fn), rng.random((1, 2)).astype(np.float32)
    weights = opened(tmp_path, {".weight": values, ".weight_scale_inv": scales}, {"quant_method": "fp8"})
    actual = weights.read(f"{NAME}.weight", (slice(None), slice(None)))
    np.testing.assert_array_equal(actual, np.repeat(np.repeat(scales, [128, 64], axis=1), OUT, axis=0))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "gptq"}, "'bits'"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version.*gemv"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype.*fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "quant_type.*nf3"),
    ],
)
def test_fields_that_say_how_are_read_or_refused_by_name(said, named):
    with pytest.raises(UserError, match=rf"quantization_config.*{named}"):
        method_of(said)


def test_mxfp4_experts_are_numbers_of_half_a_byte_times_powers_of_two(rng, tmp_path):
    codes = rng.integers(0, 16, (3, OUT, IN), dtype=np.uint8)
    scales = rng.integers(100, 150, (3, OUT, IN // 32), dtype=np.uint8)
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.empty((3, IN, OUT), np.float32)
    for e, o, i in np.ndindex(codes.shape):
        sign, number = divmod(int(codes[e, o, i]), 8)
        expected[e, i, o] = (-1) ** sign * numbers[number] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    name, bias = "model.layers.0.mlp.experts.down_proj", rng.normal(size=(3, OUT)).astype(np.float32)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(3, OUT, IN // 32, 16)
    arrays = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
    save_file(arrays, tmp_path / "model.safetensors")
    weights = QuantizedWeights(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert weights.shapes == {name: expected.shape, f"{name}_bias": bias.shape}
    for where in ((slice(1, 3), slice(8, 40), slice(3, 11)), (slice(0, 1), slice(None), slice(1, None, 2))):
        np.testing.assert_array_equal(weights.read(name, where), expected[where])


@pytest.mark.parametrize("stored", ["zero", "of the model", "unexpected"])
def test_a_bias_beside_a_weight_in_few_bits_is_kept_but_one_of_zeros_that_the_model_lacks(stored, rng, tmp_path):
    parts, _ = gptq(rng, 4, "gptq", np.arange(IN) // GROUP)
    bias = np.zeros(OUT, np.float32) if stored == "zero" else rng.normal(size=OUT).astype(np.float32)
    weights = opened(tmp_path, parts | {".bias": bias}, {"quant_method": "gptq", "bits": 4, "group_size": GROUP})
    weights.complete("", {f"{NAME}.weight", *([f"{NAME}.bias"] if stored == "of the model" else [])})
    assert (f"{NAME}.bias" in weights.shapes) == (stored != "zero")


@pytest.mark.parametrize(("bits", "groups", "zeros"), [(4, 2, False), (4, 2, True), (8, 1, False)])
def test_compressed_tensors_packs_along_the_inputs_and_zeros_along_the_outputs(bits, groups, zeros, rng, tmp_path):
    half = 2 ** (bits - 1)
    codes, zero = rng.integers(-half, half, (OUT, IN)), rng.integers(-half, half, (OUT, groups)) * zeros
    scales, order = rng.random((OUT, groups)).astype(np.float16), range(32 // bits)
    parts = {
        ".weight_packed": packed(codes + half, bits, order),
        ".weight_scale": scales,
        ".weight_shape": np.array([OUT, IN]),
    } | ({".weight_zero_point": packed(zero.T + half, bits, order).T} if zeros else {})
    expected = np.empty((OUT, IN), np.float32)
    for o, i in np.ndindex(OUT, IN):
        at = o, i * groups // IN
        expected[o, i] = (codes[o, i] - zero[at]) * np.float32(scales[at])
    check(opened(tmp_path, parts, {"quant_method": "compressed-tensors", "format": "pack-quantized"}), expected)


@pytest.mark.parametrize("counts", [(OUT, 1), (1,), (2, 4)], ids=["output", "tensor", "block"])
@pytest.mark.parametrize("form", ["int-quantized", "float-quantized"])
def test_compressed_tensors_scales_numbers_of_8_bits(form, counts, rng, tmp_path):
    values = rng.integers(-127, 128, (OUT, IN)).astype(np.int8 if form[0] == "i" else jnp.float8_e4m3fn)
    scales = rng.random(counts).astype(np.float32)
    tall, wide = (OUT // counts[0], IN // (*counts, 1)[1])
    expected = np.empty((OUT, IN), np.float32)
    for o, i in np.ndindex(OUT, IN):
        expected[o, i] = np.float32(values[o, i]) * scales.reshape(-1, (*counts, 1)[1])[o // tall, i // wide]
    parts = {".weight": values, ".weight_scale": scales}
    check(opened(tmp_path, parts, {"quant_method": "compressed-tensors", "format": form}), expected)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"format": "pack-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({}, "null"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused_by_name(said, named):
    with pytest.raises(UserError, match=rf"format is .*{named}"):
        method_of({"quant_method": "compressed-tensors", **said})


def test_other_methods_are_not_read():
    assert not is_read({"quant_method": "hqq"})
    assert not is_read({"quant_method": "bitsandbytes", "load_in_8bit": True})
