"""Mixtral, and the models that differ from it by a field: Qwen3-MoE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon.checks import check_range
from axon.foreign_json import FLAG, NULL, SIZE
from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import Attention, MoE, Rope, Routing, Segment, check_activation, gated
from axon.nn.block import MoEBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.hugging_face import EPS, EXPERTS, Architecture, Constant, Converted, Field, Row, ignored, in_layers
from axon.nn.hugging_face_layers import FULL, LOCAL, TYPES, check_types, uniform_layers
from axon.nn.hugging_face_rope import RopeRules, rope_field
from axon.nn.sizes import check_sizes
from models.llama import ATTENTION, EMBEDDING, SILU, sizes

__all__ = ["HUGGING_FACE", "Mixtral"]


@dataclass(frozen=True)
class Mixtral(DecoderConfig):
    """Jiang et al. (arXiv:2401.04088); Qwen3-MoE's QK norm (2505.09388).

    Args, besides those of `DecoderConfig`:
        mlp: an expert's width.
        routing: how experts are chosen, and how many there are. shared: width of an MLP that every token goes through.
        rope: rotary frequencies. window: keys a query sees, None for all.
        bias: on queries, keys, values and the attention's output. activation: of an expert's gate, by its name in
            `axon.nn.ACTIVATIONS`.
        qk_norm: RMSNorm of each head's queries and keys.
    """

    routing: Routing
    shared: int = 0
    rope: Rope = Rope()
    window: int | None = None
    bias: bool = False
    activation: str = "silu"
    qk_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "window")
        check_range(self, "[0, 2**31)", "shared")
        check_activation(self)

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        return super().dims | {"experts": self.routing.experts}

    def segments(self) -> list[Segment]:
        """One kind of block."""
        return [Segment(self.layers, block=Block(self))]


class Block(MoEBlock):
    """Attention and a mixture of experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: Mixtral):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        mask = Causal() & SameDocument()
        if config.window is not None:
            mask = mask & Window(config.window)
        qk_norm = (lambda heads: config.norm("head_dim")) if config.qk_norm else None
        self.attention_norm = config.norm("embed")
        self.attention = Attention(
            dims, mask, rope=config.rope, bias=config.bias, out_bias=config.bias, qk_norm=qk_norm, out_scale=scale
        )
        self.moe_norm = config.norm("embed")
        self.moe = MoE(dims, config.routing, shared=config.shared, activation=gated(config.activation), out_scale=scale)


MOE_NORM = Row("post_attention_layernorm.weight", "moe_norm/scale")
MIXTRAL_EXPERTS = (
    Row("block_sparse_moe.gate.weight", "moe/router/matrix", "experts embed"),
    Row("block_sparse_moe.experts.{experts}.w1.weight", "moe/gate", "mlp embed"),
    Row("block_sparse_moe.experts.{experts}.w3.weight", "moe/up", "mlp embed"),
    Row("block_sparse_moe.experts.{experts}.w2.weight", "moe/down", "embed mlp"),
)
EXPERT_ROWS = (
    Row("mlp.gate.weight", "moe/router/matrix", "experts embed"),
    Row("mlp.experts.{experts}.gate_proj.weight", "moe/gate", "mlp embed"),
    Row("mlp.experts.{experts}.up_proj.weight", "moe/up", "mlp embed"),
    Row("mlp.experts.{experts}.down_proj.weight", "moe/down", "embed mlp"),
)
MIXTRAL = (
    *sizes(32_000, 4096, 14_336, 32, 32, 8),
    rope_field(RopeRules(1e6, positions=131_072, width="head_dim")),
    Field("num_local_experts", "routing.experts", EXPERTS, 8, also=("num_experts",)),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS, 2),
    Field("sliding_window", "window", SIZE | NULL, None),
    uniform_layers("sliding_window"),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-5),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
)


def _read_window(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    types = [FULL if window is None else LOCAL] * config["num_hidden_layers"]
    check_types(config, types, "all layers see the window if use_sliding_window is true, and none does if not")
    return {"window": window}


WINDOW = Converted(
    _read_window,
    lambda model: {"use_sliding_window": model.window is not None, "sliding_window": model.window},
    {"use_sliding_window": FLAG, "sliding_window": SIZE | NULL} | TYPES,
)
QWEN3_MOE = (
    *(one for one in sizes(151_936, 2048, 6144, 24, 32, 4) if one.ours != "mlp"),
    rope_field(RopeRules(positions=32_768)),
    Field("moe_intermediate_size", "mlp", SIZE, 768),
    Field("num_experts", "routing.experts", EXPERTS, 128, also=("num_local_experts",)),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS, 8),
    Field("norm_topk_prob", "routing.normalise", FLAG, False),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, False),
    Constant("decoder_sparse_step", 1),
    Constant("mlp_only_layers", [], also=(None,)),
    *ignored("intermediate_size", "max_window_layers"),
    SILU,
    Field("attention_bias", "bias", FLAG, False),
    WINDOW,
)
ROUTING = {"routing.scores": "softmax", "routing.scale": 1.0, "routing.groups": 1, "routing.bias_rate": 0.0}
HUGGING_FACE = (
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        Mixtral,
        EMBEDDING + in_layers((*ATTENTION, MOE_NORM, *MIXTRAL_EXPERTS)),
        MIXTRAL,
        ROUTING | {"shared": 0, "qk_norm": False, "bias": False, "routing.normalise": True},
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        Mixtral,
        EMBEDDING + in_layers((*ATTENTION, MOE_NORM, *EXPERT_ROWS)),
        QWEN3_MOE,
        ROUTING | {"shared": 0, "qk_norm": True},
    ),
)
