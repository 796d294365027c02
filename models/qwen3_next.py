"""Qwen3-Next: Gated DeltaNet, every few layers gated attention, and experts with a shared one."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import FLAG, SIZE
from axon.kernels.attention import Causal, SameDocument
from axon.nn import Attention, LayerPattern, MoE, MultiTokenBlock, RMSNorm, Rope, Routing, Segment
from axon.nn.block import MoEBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.gated_delta import GatedDeltaNet
from axon.nn.hugging_face import (
    EPS,
    EXPERTS,
    LAYERS,
    UNUSED,
    Architecture,
    Constant,
    Converted,
    Field,
    Row,
    ignored,
    in_layers,
)
from axon.nn.hugging_face_layers import FULL, TYPES, check_types
from axon.nn.hugging_face_rope import RopeRules, rope_field
from axon.nn.sizes import check_sizes
from models.llama import ATTENTION, EMBEDDING, sizes
from models.mixtral import EXPERT_ROWS, MOE_NORM

__all__ = ["HUGGING_FACE", "Qwen3Next"]

LINEAR = "linear_attention"


@dataclass(frozen=True)
class Qwen3Next(DecoderConfig):
    """Qwen team, Qwen3-Next-80B-A3B (2025): Gated DeltaNet (arXiv:2412.06464) in place of most attention.

    Args, besides those of `DecoderConfig`:
        mlp: an expert's width; shared: that of the MLP that every token goes through, times a gate.
        full_every: of so many layers the last has attention, the others Gated DeltaNet.
        delta_heads, per_head, key_dim, value_dim: of Gated DeltaNet, the heads of queries and keys, how many of values
            each has, and their widths. conv_taps: how many tokens its convolutions see.
        routing: how experts are chosen, and how many there are. rope: rotary frequencies. norm_eps: of RMSNorm, whose
            factors are 1 + scale.
        multi_token: a block after the last, with attention and experts, that predicts the token after the next, for
            the objective `MultiToken`.
    """

    shared: int
    delta_heads: int
    per_head: int
    key_dim: int
    value_dim: int
    routing: Routing
    full_every: int = 4
    conv_taps: int = 4
    rope: Rope = Rope(10_000_000.0, fraction=0.25)
    _: KW_ONLY
    norm_eps: float = 1e-6
    multi_token: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "shared", "delta_heads", "per_head", "key_dim", "value_dim", "conv_taps")
        check_range(self, "[2, 2**16]", "full_every")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        delta = field_values(self, ("delta_heads", "per_head", "key_dim", "value_dim", "conv_taps"))
        return super().dims | {"experts": self.routing.experts} | delta

    @property
    def norm(self) -> partial[RMSNorm]:
        return partial(super().norm, zero_centered=True)

    def segments(self) -> list[Segment]:
        """Periods of `linear…, full`, and as many linear layers as remain."""
        pattern = LayerPattern(self.layers, self.full_every - 1, "linear", "full")
        return pattern.segments(partial(Block, self, self._linear), partial(Block, self, self._full))

    def mtp(self) -> MultiTokenBlock | None:
        if not self.multi_token:
            return None
        return MultiTokenBlock(self.dims, Block(self, self._full), kind="full", norm=self.norm)

    def _linear(self, out_scale: float) -> GatedDeltaNet:
        return GatedDeltaNet(self.dims, self.norm_eps, out_scale=out_scale)

    def _full(self, out_scale: float) -> Attention:
        mask, norm = Causal() & SameDocument(), self.norm
        return Attention(
            self.dims, mask, rope=self.rope, gated=True, qk_norm=lambda heads: norm("head_dim"), out_scale=out_scale
        )


class Block(MoEBlock):
    """Attention or Gated DeltaNet, and experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: Qwen3Next, mixer: Any):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm = config.norm("embed")
        self.attention = mixer(scale)
        self.moe_norm = config.norm("embed")
        self.moe = MoE(dims, config.routing, shared=config.shared, gated_shared=True, out_scale=scale)


def _delta(theirs: str, *rows: tuple[str, str]) -> tuple[Row, ...]:
    return tuple(Row(f"linear_attn.{theirs}", f"attention/{ours}", form) for ours, form in rows)


DELTA = (
    *_delta(
        "in_proj_qkvz.weight",
        ("query", "(delta_heads [key_dim]) embed"),
        ("key", "(delta_heads [key_dim]) embed"),
        ("value", "(delta_heads [per_head value_dim]) embed"),
        ("gate", "(delta_heads [per_head value_dim]) embed"),
    ),
    *_delta(
        "in_proj_ba.weight",
        ("beta", "(delta_heads [per_head]) embed"),
        ("decay", "(delta_heads [per_head]) embed"),
    ),
    *_delta(
        "conv1d.weight",
        ("query_taps", "[delta_heads key_dim] 1 conv_taps"),
        ("key_taps", "[delta_heads key_dim] 1 conv_taps"),
        ("value_taps", "[delta_heads per_head value_dim] 1 conv_taps"),
    ),
    *_delta("A_log", ("rate", "(delta_heads per_head)")),
    *_delta("dt_bias", ("step", "(delta_heads per_head)")),
    *_delta("norm.weight", ("norm/scale", "value_dim")),
    *_delta("out_proj.weight", ("out", "embed (delta_heads per_head value_dim)")),
)
GATED = (
    Row("self_attn.q_proj.weight", "attention/query", "(heads [head_dim]) embed"),
    Row("self_attn.q_proj.weight", "attention/gate", "(heads [head_dim]) embed"),
)
SHARED = (
    Row("mlp.shared_expert_gate.weight", "moe/shared_gate", "1 embed"),
    Row("mlp.shared_expert.gate_proj.weight", "moe/shared/gate", "mlp embed"),
    Row("mlp.shared_expert.up_proj.weight", "moe/shared/up", "mlp embed"),
    Row("mlp.shared_expert.down_proj.weight", "moe/shared/down", "embed mlp"),
)


BLOCK = (*(row for row in ATTENTION if "q_proj.weight" not in row.theirs), *GATED, MOE_NORM, *EXPERT_ROWS, *SHARED)
MTP = (
    Row("mtp.pre_fc_norm_embedding.weight", "mtp/embedding_norm/scale"),
    Row("mtp.pre_fc_norm_hidden.weight", "mtp/hidden_norm/scale"),
    Row("mtp.fc.weight", "mtp/from_embedding", "embed_out [embed]"),
    Row("mtp.fc.weight", "mtp/from_hidden", "embed_out [embed]"),
    Row("mtp.norm.weight", "mtp/norm/scale"),
    *in_layers(BLOCK, "mtp.layers.0", "mtp/block"),
)


def _read_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    every, types = config.get("full_attention_interval", 4), config.get("layer_types")
    if types is not None:
        every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    kinds = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(config["num_hidden_layers"])]
    check_types(config, kinds, "linear layers and a full one must come in turn")
    if every == 1:
        raise UserError("config.json: layer_types has full layers alone; there must be linear ones between them")
    return {"full_every": every}


def _write_layers(model: Qwen3Next) -> dict[str, Any]:
    kinds = [FULL if (layer + 1) % model.full_every == 0 else LINEAR for layer in range(model.layers)]
    return {"layer_types": kinds, "full_attention_interval": model.full_every}


def _read_values(config: Mapping[str, Any]) -> dict[str, Any]:
    keys, values = config.get("linear_num_key_heads", 16), config.get("linear_num_value_heads", 32)
    if values % keys:
        raise UserError(f"config.json: linear_num_value_heads is {values}; must be a multiple of key heads, {keys}")
    return {"delta_heads": keys, "per_head": values // keys}


FIELDS = (
    *(one for one in sizes(151_936, 2048, 5632, 48, 16, 2, 256) if one.ours != "mlp"),
    rope_field(RopeRules(positions=32_768, phi=True, fraction=0.25)),
    Converted(_read_layers, _write_layers, TYPES | {"full_attention_interval": LAYERS}),
    Converted(
        _read_values,
        lambda m: {"linear_num_key_heads": m.delta_heads, "linear_num_value_heads": m.delta_heads * m.per_head},
        {"linear_num_key_heads": SIZE, "linear_num_value_heads": SIZE},
    ),
    Field("linear_key_head_dim", "key_dim", SIZE, 128),
    Field("linear_value_head_dim", "value_dim", SIZE, 128),
    Field("linear_conv_kernel_dim", "conv_taps", SIZE, 4),
    Field("moe_intermediate_size", "mlp", SIZE, 512),
    Field("shared_expert_intermediate_size", "shared", SIZE, 512),
    Field("num_experts", "routing.experts", EXPERTS, 512),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS, 10),
    Field("norm_topk_prob", "routing.normalise", FLAG, True),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, False),
    Constant("decoder_sparse_step", 1),
    Constant("mlp_only_layers", [], also=(None,)),
    Constant("attention_bias", False),
    *ignored("intermediate_size"),
    Constant("hidden_act", "silu"),
)
ROUTING = {"routing.scores": "softmax", "routing.scale": 1.0, "routing.groups": 1, "routing.bias_rate": 0.0}
HUGGING_FACE = (
    Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        Qwen3Next,
        EMBEDDING + in_layers(BLOCK + DELTA) + MTP,
        FIELDS,
        ROUTING,
        unused=(*UNUSED, "mtp.*"),  # as transformers leaves it out
        multi_token="mtp.fc.weight",
    ),
)
