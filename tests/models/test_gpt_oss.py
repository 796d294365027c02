"""gpt-oss: sizes of its attention and experts, and sinks."""

from axon.nn import Routing, parameters
from models.gpt_oss import GptOss

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
