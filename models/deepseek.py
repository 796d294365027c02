"""DeepSeek-V2 and V3: latent attention, experts after the first layers, and a second token predicted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import COUNT, FLAG, NULL, SIZE, integer, number, one_of, read_field
from axon.kernels.attention import Causal, SameDocument
from axon.nn import (
    Depth,
    GatedMLP,
    LanguageModel,
    LatentAttention,
    MoE,
    MultiTokenBlock,
    RMSNorm,
    Rope,
    Routing,
    Segment,
    YarnScaling,
    check_activation,
    gated,
)
from axon.nn.block import MLPBlock, MoEBlock
from axon.nn.hugging_face import (
    AFTER,
    EPS,
    EXPERTS,
    LAYERS,
    UNUSED,
    Architecture,
    Constant,
    Converted,
    Field,
    Ignored,
    Row,
    ignored,
    in_layers,
)
from axon.nn.hugging_face_rope import RopeRules, rope_field
from axon.nn.sizes import check_sizes, padded
from models.llama import ALL_FULL, DIVISIBLE, EMBEDDING, MLP, NO_BIAS, NO_MLP_BIAS, NO_SLIDING_WINDOW, SILU
from models.mixtral import EXPERT_ROWS, MOE_NORM

__all__ = ["HUGGING_FACE", "DeepSeek"]


@dataclass(frozen=True)
class DeepSeek:
    """DeepSeek-V2 (arXiv:2405.04434) and DeepSeek-V3 (2412.19437), whose sizes are the defaults.

    Args:
        vocab, embed, layers, heads: sizes. first_dense: how many layers, of the kind "dense", have a gated MLP, of
            width mlp; those after them, of the kind "experts", have experts, each of width expert_mlp.
        routing: how experts are chosen, and how many there are. shared: width of an MLP that every token of such a
            layer goes through.
        q_latent, kv_latent: what a token's queries, and its keys and values, are made from; q_latent None: the stream.
        nope_dim, rope_dim: widths of a head's queries and keys, of what is not rotated and of what is; value_dim: of
            its values.
        rope: rotary frequencies; interleaved: whether neighbours are a pair, see `axon.nn.rope.rotate`. norm_eps: of
            RMSNorm; that of latents is 1e-6.
        activation: of gates, by its name in `axon.nn.ACTIVATIONS`. tied: one matrix for embedding and head.
        multi_token: a block after the last, and of its kind, that predicts the token after the next, for the objective
            `MultiToken`.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
    """

    vocab: int = 129_280
    embed: int = 7168
    layers: int = 61
    first_dense: int = 3
    heads: int = 128
    mlp: int = 18_432
    expert_mlp: int = 2048
    routing: Routing = Routing(
        256, 8, "sigmoid", scale=2.5, groups=8, kept_groups=4, bias_rate=0.001, sequence_loss=1e-4
    )
    shared: int = 2048
    q_latent: int | None = 1536
    kv_latent: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    rope: Rope = Rope(10_000.0, YarnScaling(40.0, original=4096, mscale_all_dim=1.0))
    interleaved: bool = True
    norm_eps: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    multi_token: bool = False
    vocab_multiple: int = 1

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "layers", "heads", "mlp", "expert_mlp", "q_latent", "kv_latent")
        check_sizes(self, *sizes, "nope_dim", "rope_dim", "value_dim")
        check_range(self, "[0, 2**31)", "first_dense", "shared")
        check_activation(self)
        if self.rope_dim % 2:
            raise UserError(f"DeepSeek: rope_dim {self.rope_dim} is odd, and rotary embedding rotates pairs")
        if self.first_dense > self.layers:
            raise UserError(f"DeepSeek: first_dense {self.first_dense} is more than layers {self.layers}")

    @property
    def kinds(self) -> dict[str, int]:
        """Kind of block → how many layers are of it, in their order."""
        counts = {"dense": self.first_dense, "experts": self.layers - self.first_dense}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes; `mlp` is that of the dense layers."""
        sizes = field_values(self, ("embed", "heads", "mlp", "kv_latent", "nope_dim", "rope_dim", "value_dim"))
        latent = {} if self.q_latent is None else {"q_latent": self.q_latent}
        own = {"experts": self.routing.experts, "vocab": padded(self.vocab, self.vocab_multiple)}
        return sizes | latent | own

    @property
    def norm(self) -> partial[RMSNorm]:
        """RMSNorm with all arguments but its axes."""
        return partial(RMSNorm, dims=self.dims, eps=self.norm_eps)

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        blocks: dict[str, Callable[[DeepSeek], nnx.Module]] = {"dense": DenseBlock, "experts": ExpertBlock}
        segments = (Segment(times, **{kind: blocks[kind](self)}) for kind, times in self.kinds.items())
        *_, last = self.kinds
        mtp = None
        if self.multi_token:
            mtp = MultiTokenBlock(self.dims, blocks[last](self), kind=last, norm=self.norm)
        return LanguageModel(self.dims, Depth(*segments), self.norm("embed"), tied=self.tied, vocab=self.vocab, mtp=mtp)


def attention(config: DeepSeek) -> LatentAttention:
    """The attention of both kinds of block."""
    return LatentAttention(
        config.dims,
        Causal() & SameDocument(),
        rope=config.rope,
        interleaved=config.interleaved,
        out_scale=(2 * config.layers) ** -0.5,
    )


class DenseBlock(MLPBlock):
    """Latent attention and a gated MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: DeepSeek):
        self.attention_norm = config.norm("embed")
        self.attention = attention(config)
        self.mlp_norm = config.norm("embed")
        self.mlp = GatedMLP(config.dims, activation=gated(config.activation), out_scale=(2 * config.layers) ** -0.5)


class ExpertBlock(MoEBlock):
    """Latent attention and a mixture of experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: DeepSeek):
        self.attention_norm = config.norm("embed")
        self.attention = attention(config)
        self.moe_norm = config.norm("embed")
        self.moe = MoE(
            {**config.dims, "mlp": config.expert_mlp},
            config.routing,
            shared=config.shared,
            activation=gated(config.activation),
            out_scale=(2 * config.layers) ** -0.5,
        )


BLOCK = (
    Row("input_layernorm.weight", "attention_norm/scale"),
    Row("self_attn.q_proj.weight", "attention/query", "(heads [nope_dim]) embed"),
    Row("self_attn.q_proj.weight", "attention/query_rope", "(heads [rope_dim]) embed"),
    Row("self_attn.q_a_proj.weight", "attention/query_down", "q_latent embed"),
    Row("self_attn.q_a_layernorm.weight", "attention/query_norm/scale"),
    Row("self_attn.q_b_proj.weight", "attention/query", "(heads [nope_dim]) q_latent"),
    Row("self_attn.q_b_proj.weight", "attention/query_rope", "(heads [rope_dim]) q_latent"),
    Row("self_attn.kv_a_proj_with_mqa.weight", "attention/kv_down", "[kv_latent] embed"),
    Row("self_attn.kv_a_proj_with_mqa.weight", "attention/key_rope", "[rope_dim] embed"),
    Row("self_attn.kv_a_layernorm.weight", "attention/kv_norm/scale"),
    Row("self_attn.kv_b_proj.weight", "attention/key", "(heads [nope_dim]) kv_latent"),
    Row("self_attn.kv_b_proj.weight", "attention/value", "(heads [value_dim]) kv_latent"),
    Row("self_attn.o_proj.weight", "attention/out", "embed (heads value_dim)"),
    Row("post_attention_layernorm.weight", "mlp_norm/scale"),
    MOE_NORM,
    *MLP,
    *EXPERT_ROWS,
    Row("mlp.gate.e_score_correction_bias", "moe/router/bias"),
    Row("mlp.shared_experts.gate_proj.weight", "moe/shared/gate", "mlp embed"),
    Row("mlp.shared_experts.up_proj.weight", "moe/shared/up", "mlp embed"),
    Row("mlp.shared_experts.down_proj.weight", "moe/shared/down", "embed mlp"),
)
ROWS = EMBEDDING + in_layers(BLOCK)
LAST = f"model.layers.{AFTER}"
"""Multi-token prediction's block in files: it is counted as the layer after the last."""
AHEAD = (
    Row(f"{LAST}.enorm.weight", "mtp/embedding_norm/scale"),
    Row(f"{LAST}.hnorm.weight", "mtp/hidden_norm/scale"),
    Row(f"{LAST}.eh_proj.weight", "mtp/from_embedding", "embed_out [embed]"),
    Row(f"{LAST}.eh_proj.weight", "mtp/from_hidden", "embed_out [embed]"),
    Row(f"{LAST}.shared_head.norm.weight", "mtp/norm/scale"),
    *in_layers(BLOCK, LAST, "mtp/block"),
)


def _read_v2_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("topk_method", "greedy") == "greedy":
        return {"routing.groups": 1, "routing.kept_groups": 1}
    groups, kept = (read_field("config.json", config, name, EXPERTS) for name in ("n_group", "topk_group"))
    return {"routing.groups": groups, "routing.kept_groups": kept, "routing.group_best": 1}


def _write_v2_groups(model: DeepSeek) -> dict[str, Any]:
    if model.routing.groups == 1:
        return {"topk_method": "greedy"}
    groups = {"n_group": model.routing.groups, "topk_group": model.routing.kept_groups}
    return {"topk_method": "group_limited_greedy"} | groups


def _kv_heads(default: int | None) -> Converted:
    """As many as heads, as latent attention has them: transformers reads the field, and fails with another value."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", default)
        if kv_heads not in (None, heads):
            raise UserError(f"config.json: num_key_value_heads is {kv_heads}; must be num_attention_heads, {heads}")
        return {}

    return Converted(read, lambda model: {"num_key_value_heads": model.heads}, {"num_key_value_heads": SIZE | NULL})


NEXT = "num_nextn_predict_layers"


def _read_rope_width(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers has frequencies for `head_dim` elements, and rotates `qk_rope_head_dim` of them."""
    width = config["qk_rope_head_dim"]
    if config.get("head_dim", width) != width:
        raise UserError(f"config.json: head_dim is {config['head_dim']}; must be qk_rope_head_dim, {width}")
    return {}


def _shared(default: int) -> Converted:
    """The width of all shared experts; `default`: how many there are."""
    return Converted(
        lambda config: {"shared": config.get("n_shared_experts", default) * config["moe_intermediate_size"]},
        lambda model: {"n_shared_experts": model.shared // model.expert_mlp},
        {"n_shared_experts": integer("[0, 65536]")},
    )


def _sizes(vocab: int, embed: int, mlp: int, layers: int, heads: int, experts: int, width: int) -> tuple[Field, ...]:
    """Fields of sizes, with a family's defaults; `width`: of an expert."""
    return (
        Field("vocab_size", "vocab", SIZE, vocab),
        Field("hidden_size", "embed", SIZE, embed),
        Field("intermediate_size", "mlp", SIZE, mlp),
        Field("num_hidden_layers", "layers", LAYERS, layers),
        Field("num_attention_heads", "heads", SIZE, heads),
        Field("n_routed_experts", "routing.experts", EXPERTS, experts, also=("num_experts", "num_local_experts")),
        Field("moe_intermediate_size", "expert_mlp", SIZE, width),
    )


FIELDS = (
    Field("q_lora_rank", "q_latent", SIZE | NULL, 1536),
    Field("kv_lora_rank", "kv_latent", SIZE, 512),
    Field("qk_nope_head_dim", "nope_dim", SIZE, 128),
    Field("qk_rope_head_dim", "rope_dim", SIZE, 64),
    Field("v_head_dim", "value_dim", SIZE, 128),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    *ignored("qk_head_dim"),  # the sum of two above
    Constant("moe_layer_freq", 1),
    NO_BIAS,
    SILU,
    Field("tie_word_embeddings", "tied", FLAG, False),
    ALL_FULL,
    NO_SLIDING_WINDOW,
    *ignored("aux_loss_alpha", "ep_size", "seq_aux"),
    Ignored("num_mtp_layers", COUNT | NULL),
)
V2 = (
    *_sizes(102_400, 4096, 11_008, 32, 32, 64, 1407),
    DIVISIBLE,
    *FIELDS,
    _shared(2),
    *ignored("head_dim", NEXT),
    rope_field(RopeRules(latent=True, width="filled")),
    _kv_heads(None),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS),
    Field("first_k_dense_replace", "first_dense", COUNT, 0),
    Field("routed_scaling_factor", "routing.scale", number("(0, inf)"), 1.0),
    Converted(
        _read_v2_groups,
        _write_v2_groups,
        {
            "topk_method": one_of("greedy", "group_limited_greedy"),
            "n_group": EXPERTS | NULL,
            "topk_group": EXPERTS | NULL,
        },
    ),
    Constant("scoring_func", "softmax"),
    Constant("norm_topk_prob", False, also=(None,)),
    NO_MLP_BIAS,
)
V3 = (
    *_sizes(129_280, 7168, 18_432, 61, 128, 256, 2048),
    *FIELDS,
    _shared(1),
    # The block is written where there is one, and read where it is asked for and there, whatever the field says.
    Converted(lambda config: {}, lambda model: {NEXT: int(model.multi_token)}, {NEXT: COUNT | NULL}),
    Converted(_read_rope_width, lambda model: {}, {"head_dim": SIZE}),
    rope_field(RopeRules(positions=4096, latent=True, width="filled")),
    _kv_heads(128),
    Field("num_experts_per_tok", "routing.top_k", EXPERTS, 8),
    Field("first_k_dense_replace", "first_dense", COUNT, 3),
    Field("routed_scaling_factor", "routing.scale", number("(0, inf)"), 2.5),
    Field("n_group", "routing.groups", EXPERTS, 8),
    Field("topk_group", "routing.kept_groups", EXPERTS, 4),
    Field("norm_topk_prob", "routing.normalise", FLAG | NULL, True, null=False),
    Field("rope_interleave", "interleaved", FLAG | NULL, True, null=False),
    Constant("scoring_func", "sigmoid"),
    Constant("topk_method", "noaux_tc"),
)
SOFTMAX = {"routing.scores": "softmax", "routing.normalise": False, "routing.bias_rate": 0.0}
SIGMOID = {"routing.scores": "sigmoid", "routing.group_best": 2, "routing.bias_rate": 0.001}
HUGGING_FACE = (
    Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        DeepSeek,
        ROWS,
        V2,
        SOFTMAX | {"interleaved": True, "multi_token": False},
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        DeepSeek,
        ROWS + AHEAD,
        V3,
        SIGMOID,
        unused=(*UNUSED, f"{LAST}.*", "model.layers.61.*"),  # as transformers leaves it out, by the number that V3 has
        multi_token=f"{LAST}.eh_proj.weight",
    ),
)
