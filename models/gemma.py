"""Gemma 2 and 3: sliding-window layers between full ones, norms before and after."""

from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axon.checks import check_range
from axon.foreign_json import FLAG, NULL, SIZE, number
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.nn import (
    Attention,
    Auxiliary,
    Depth,
    GatedMLP,
    Inputs,
    LanguageModel,
    LayerPattern,
    RMSNorm,
    Rope,
    Segment,
    check_activation,
    gated,
)
from axon.nn.block import Block as AttentionBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.hugging_face import EPS, Architecture, Constant, Field, Ignored, Row, ignored, in_layers
from axon.nn.hugging_face_layers import local_layers
from axon.nn.hugging_face_rope import RopeRules, rope_field, two_ropes
from axon.nn.language_model import RESIDUAL
from axon.nn.sizes import check_sizes
from models.llama import ACTIVATION, ATTENTION, DIVISIBLE, EMBEDDING, MLP, sizes

__all__ = ["HUGGING_FACE", "Gemma"]


@dataclass(frozen=True)
class Gemma(DecoderConfig):
    """Gemma team, Gemma 2 (arXiv:2408.00118) and Gemma 3 (2503.19786).

    Args, besides those of `DecoderConfig`:
        local_layers: sliding-window layers before each full one: 1 in Gemma 2, 5 in Gemma 3.
        window: keys that a query of a local layer sees. local_rope, rope: frequencies of local and of full layers.
        query_pre_attn_scalar: scores are divided by its square root; head_dim by default.
        soft_cap, logit_soft_cap: c of c·tanh(score / c), and of the logits; None for none (Gemma 3).
        qk_norm: RMSNorm of each head's queries and keys (Gemma 3).
        bias: on queries, keys, values and the attention's output. activation: of the MLP's gate, by its name in
            `axon.nn.ACTIVATIONS`.
    """

    head_dim: int = field()  # None is no default here
    window: int
    local_layers: int = 1
    local_rope: Rope = Rope()
    rope: Rope = Rope()
    query_pre_attn_scalar: float | None = None
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    qk_norm: bool = False
    bias: bool = False
    activation: str = "gelu_pytorch_tanh"
    _: KW_ONLY
    norm_eps: float = 1e-6
    tied: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "window", "local_layers")
        check_range(self, "(0, inf)", "query_pre_attn_scalar", "soft_cap", "logit_soft_cap")
        check_activation(self)

    @property
    def norm(self) -> partial[RMSNorm]:
        return partial(super().norm, zero_centered=True)

    def build(self) -> "GemmaModel":
        """The module, its parameters not yet initialised."""
        return GemmaModel(self)

    def segments(self) -> list[Segment]:
        """Periods of `local…, full`, and as many local layers, `last`, as remain."""
        seen = Causal() & SameDocument()
        local = partial(Block, self, seen & Window(self.window), self.local_rope)
        pattern = LayerPattern(self.layers, self.local_layers, "local", "full")
        return pattern.segments(local, partial(Block, self, seen, self.rope))


class GemmaModel(LanguageModel):
    """A language model that scales its embeddings by √embed."""

    def __init__(self, config: Gemma):
        super().__init__(
            config.dims,
            Depth(*config.segments()),
            config.norm("embed"),
            tied=config.tied,
            vocab=config.vocab,
            soft_cap=config.logit_soft_cap,
        )

    def embed(self, inputs: Inputs):
        x = super().embed(inputs)
        # Rounded to the compute dtype, as the models were trained: in bfloat16 √1152 is 34.
        return x * jnp.asarray(self.dims["embed"] ** 0.5, x.dtype)


class Block(AttentionBlock):
    """Attention and a gated MLP, each between two norms on its way from the residual stream and back."""

    def __init__(self, config: Gemma, mask: Mask, rope: Rope):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm, self.attention_post_norm = config.norm("embed"), config.norm("embed")
        self.attention = Attention(
            dims,
            mask,
            rope=rope,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            soft_cap=config.soft_cap,
            bias=config.bias,
            out_bias=config.bias,
            qk_norm=(lambda heads: config.norm("head_dim")) if config.qk_norm else None,
            out_scale=scale,
        )
        self.mlp_norm, self.mlp_post_norm = config.norm("embed"), config.norm("embed")
        self.mlp = GatedMLP(dims, activation=gated(config.activation), out_scale=scale)

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = checkpoint_name(x + self.attention_post_norm(out, RESIDUAL), "residual")
        out = self.mlp(self.mlp_norm(x, RESIDUAL))
        return x + self.mlp_post_norm(out, RESIDUAL), cache, Auxiliary()


ROWS = EMBEDDING + in_layers(
    (
        *ATTENTION,
        Row("post_attention_layernorm.weight", "attention_post_norm/scale"),
        Row("pre_feedforward_layernorm.weight", "mlp_norm/scale"),
        *MLP,
        Row("post_feedforward_layernorm.weight", "mlp_post_norm/scale"),
    )
)


FIELDS = (
    Field("sliding_window", "window", SIZE, 4096),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", SIZE, 256, unset=lambda model: model.head_dim),
    DIVISIBLE,
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("hidden_activation", "activation", ACTIVATION, "gelu_pytorch_tanh"),
    *ignored("hidden_act", "cache_implementation"),
    Field("attention_bias", "bias", FLAG, False),
    Constant("use_bidirectional_attention", False, also=(None,)),
    Field("tie_word_embeddings", "tied", FLAG, True),
)
CAP = number("(0, inf)") | NULL
GEMMA2 = (
    *sizes(256_000, 2304, 9216, 26, 8, 4, 256),
    *FIELDS,
    local_layers(2),
    rope_field(RopeRules(positions=8192, layered=True), "rope", "local_rope"),
    Field("attn_logit_softcapping", "soft_cap", CAP, 50.0),
    Field("final_logit_softcapping", "logit_soft_cap", CAP, 30.0),
)
GEMMA3 = (
    *sizes(262_208, 2304, 9216, 26, 8, 4, 256),
    *FIELDS,
    local_layers(6, "sliding_window_pattern"),
    two_ropes(RopeRules(1e6, 10_000.0, positions=131_072)),
    Ignored("attn_logit_softcapping", CAP),  # which transformers passes over
    Field("final_logit_softcapping", "logit_soft_cap", CAP, None),
    *ignored("_sliding_window_pattern"),
)
HUGGING_FACE = (
    Architecture("Gemma2ForCausalLM", "gemma2", Gemma, ROWS, GEMMA2, {"qk_norm": False}),
    Architecture("Gemma3ForCausalLM", "gemma3_text", Gemma, ROWS, GEMMA3, {"qk_norm": True, "soft_cap": None}),
)
