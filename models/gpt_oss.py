"""gpt-oss: attention sinks, sliding-window layers between full ones, and experts with biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon.errors import UserError
from axon.foreign_json import FLAG, SIZE, number
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.nn import Attention, ClampedSwiGLU, MoE, Rope, Routing, Segment, YarnScaling
from axon.nn.block import MoEBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.hugging_face import EPS, EXPERTS, Architecture, Constant, Converted, Field, Row, ignored, in_layers
from axon.nn.hugging_face_layers import FULL, LOCAL, TYPES, check_types
from axon.nn.hugging_face_rope import RopeRules, rope_field
from axon.nn.sizes import check_sizes
from models.llama import ATTENTION, EMBEDDING, sizes

__all__ = ["HUGGING_FACE", "GptOss"]


@dataclass(frozen=True)
class GptOss(DecoderConfig):
    """OpenAI, gpt-oss-120b & gpt-oss-20b Model Card (arXiv:2508.10925); the 20b's sizes are the defaults.

    Args, besides those of `DecoderConfig`:
        mlp: an expert's width.
        routing: how experts are chosen, and how many there are. activation: of their gates and ups.
        window: keys that a query of every other layer, the first one's, sees. rope: rotary frequencies.
    """

    vocab: int = 201_088
    embed: int = 2880
    layers: int = 24
    heads: int = 64
    kv_heads: int = 8
    mlp: int = 2880
    head_dim: int = 64
    routing: Routing = Routing(32, 4)
    activation: ClampedSwiGLU = ClampedSwiGLU()
    window: int = 128
    rope: Rope = Rope(150_000.0, YarnScaling(32.0, original=4096, truncate=False))

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "window")
        if self.layers % 2:
            raise UserError(f"GptOss: layers {self.layers} is odd, and they come in pairs of a local and a full one")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        return super().dims | {"experts": self.routing.experts}

    def segments(self) -> list[Segment]:
        """Pairs of a local and a full layer."""
        seen = Causal() & SameDocument()
        pair = {"local": Block(self, seen & Window(self.window)), "full": Block(self, seen)}
        return [Segment(self.layers // 2, **pair)]


class Block(MoEBlock):
    """Attention with sinks and a mixture of experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: GptOss, mask: Mask):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm = config.norm("embed")
        self.attention = Attention(dims, mask, rope=config.rope, sinks=True, bias=True, out_bias=True, out_scale=scale)
        self.moe_norm = config.norm("embed")
        self.moe = MoE(dims, config.routing, activation=config.activation, bias=True, out_scale=scale)


ROWS = EMBEDDING + in_layers(
    (
        *ATTENTION,
        Row("self_attn.sinks", "attention/sinks"),
        Row("post_attention_layernorm.weight", "moe_norm/scale"),
        Row("mlp.router.weight", "moe/router/matrix", "experts embed"),
        Row("mlp.router.bias", "moe/router/logit_bias"),
        Row("mlp.experts.gate_up_proj", "moe/gate", "experts embed (mlp [1])"),
        Row("mlp.experts.gate_up_proj", "moe/up", "experts embed (mlp [1])"),
        Row("mlp.experts.gate_up_proj_bias", "moe/gate_bias", "experts (mlp [1])"),
        Row("mlp.experts.gate_up_proj_bias", "moe/up_bias", "experts (mlp [1])"),
        Row("mlp.experts.down_proj", "moe/down"),
        Row("mlp.experts.down_proj_bias", "moe/down_bias"),
    )
)


def _read_layer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    types = [(LOCAL, FULL)[layer % 2] for layer in range(config["num_hidden_layers"])]
    check_types(config, types, "every other layer is a full one here, and the first a local one")
    return {}


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""`rope_parameters` of a config.json without any."""
FIELDS = (
    *sizes(201_088, 2880, 2880, 36, 64, 8, 64),
    Field("num_local_experts", "routing.experts", EXPERTS, 128, also=("num_experts",)),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS, 4, also=("experts_per_token",)),
    Field("swiglu_alpha", "activation.alpha", number("(0, inf)"), 1.702),
    Field("swiglu_limit", "activation.limit", number("(0, inf)"), 7.0),
    Field("sliding_window", "window", SIZE, 128),
    Converted(_read_layer_types, lambda model: {"layer_types": [LOCAL, FULL] * (model.layers // 2)}, TYPES),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-5),
    rope_field(RopeRules(150_000.0, positions=131_072, default=YARN, layered=True, width="filled")),
    Constant("attention_bias", True),
    Field("tie_word_embeddings", "tied", FLAG, False),
    *ignored("hidden_act", "initial_context_length"),
)
ROUTING = {"routing.scores": "softmax", "routing.normalise": True, "routing.scale": 1.0, "routing.groups": 1}
HUGGING_FACE = (Architecture("GptOssForCausalLM", "gpt_oss", GptOss, ROWS, FIELDS, ROUTING),)
