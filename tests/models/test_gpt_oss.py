"""gpt-oss: sizes of its attention and experts, and sinks."""

import json

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.model import open_model
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.layout import Layout
from axon.nn import Routing, parameters
from axon.runtime import Runtime, flattened
from models.gpt_oss import HUGGING_FACE, GptOss

SMALL = {
    "vocab": 40,
    "embed": 24,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 32,
    "head_dim": 6,
    "routing": Routing(4, 2),
}


def test_attention_has_the_sizes_of_the_published_20b_and_a_sink_for_each_head():
    attention = {p: s for p, s in parameters(GptOss().build()).items() if "/attention/" in p}
    weights = 2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64
    biases = 64 * 64 + 2 * 8 * 64 + 2880
    assert sum(spec.size for spec in attention.values()) == 24 * (weights + biases + 64)
    assert attention["layers/local/attention/sinks"].shape == (12, 64)


def test_experts_have_the_sizes_of_the_published_20b():
    """`mlp1` and `mlp2` of its checkpoint, with their biases; and `gate`."""
    experts = {p: s for p, s in parameters(GptOss().build()).items() if "/moe/" in p}
    matrices, biases = 32 * 3 * 2880 * 2880, 32 * 3 * 2880
    assert sum(spec.size for spec in experts.values()) == 24 * (matrices + biases + 2880 * 32 + 32)
    assert not any(spec.decay for path, spec in experts.items() if path.endswith("bias"))


def test_the_first_of_each_pair_of_layers_sees_a_window():
    blocks = GptOss(**SMALL).build().layers.blocks
    assert [(b.moe.up.layers, str(b.attention.config.mask)) for b in blocks.values()] == [
        ((0, 2), "causal & same document & window 128"),
        ((1, 3), "causal & same document"),
    ]


def in_mxfp4(rng, shape):
    """Blocks and scales of `experts in out`, as the published weights have them, and the numbers."""
    experts, inputs, outputs = shape
    codes = rng.integers(0, 16, (experts, outputs, inputs), dtype=np.uint8)
    scales = rng.integers(110, 130, (experts, outputs, inputs // 32), dtype=np.uint8)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    numbers *= np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=2)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs.reshape(*scales.shape, 16), scales, numbers.swapaxes(1, 2)


def test_published_experts_are_kept_in_mxfp4_without_a_bit_of_change(rng, tmp_path):
    model = GptOss(**SMALL | {"embed": 64, "layers": 2})
    arrays, numbers = {}, {}
    for name, shape in pieces_of(HUGGING_FACE[0], model.build(), model.vocab).shapes.items():
        if name.endswith(("up_proj", "down_proj")):
            arrays[f"{name}_blocks"], arrays[f"{name}_scales"], numbers[name] = in_mxfp4(rng, shape)
        else:
            arrays[name] = rng.normal(size=shape).astype(np.float32)
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, tmp_path / "model.safetensors")
    config = write_config(HUGGING_FACE[0], model) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide, narrow = (Runtime(model, Layout(), weights=w, devices=jax.devices()[:1]) for w in ("bfloat16", "mxfp4"))
    stored, _ = open_model(f"hf:{tmp_path}").load(wide, model.vocab, narrow.derived)
    merged = narrow.merged(flattened(stored))
    assert {path.rpartition("/")[2] for path in narrow.operands} == {"gate", "up", "down"}
    for layer, kind in enumerate(("local", "full")):
        experts = f"model.layers.{layer}.mlp.experts"
        own = {name: merged[f"layers/{kind}/moe/{name}"][0] for name in ("gate", "up", "down")}
        np.testing.assert_array_equal(own["gate"], numbers[f"{experts}.gate_up_proj"][..., ::2])
        np.testing.assert_array_equal(own["up"], numbers[f"{experts}.gate_up_proj"][..., 1::2])
        np.testing.assert_array_equal(own["down"], numbers[f"{experts}.down_proj"])
