"""Llama 2 and 3, and the models that differ from it by a field: Mistral, Qwen 2 and 3, Phi 3 and 4, SmolLM 3."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from axon.checks import check_range
from axon.errors import UserError
from axon.foreign_json import FLAG, NULL, SIZE, list_of, one_of, shown
from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import ACTIVATIONS, Attention, GatedMLP, LayerPattern, Rope, Segment, check_activation, gated
from axon.nn.block import MLPBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.hugging_face import (
    EPS,
    LAYERS,
    TOKEN_ID,
    Architecture,
    Constant,
    Converted,
    Field,
    Row,
    SameAs,
    ignored,
    in_layers,
)
from axon.nn.hugging_face_layers import uniform_layers, windowed_layers
from axon.nn.hugging_face_rope import RopeRules, rope_field
from axon.nn.sizes import check_sizes, head_dim

__all__ = ["HUGGING_FACE", "Llama"]


@dataclass(frozen=True)
class Llama(DecoderConfig):
    """Touvron et al. (arXiv:2307.09288) and Llama team (2407.21783); Mistral's window (2310.06825), Qwen 2's bias
    (2407.10671), Qwen 3's QK norm (2505.09388), Phi-3's LongRoPE (2404.14219), SmolLM3's layers that do not rotate.

    Args, besides those of `DecoderConfig`:
        rope: rotary frequencies. nope_every: of so many layers the last does not rotate (NoPE: Yang et al.,
            arXiv:2501.18795); None: all do. window: keys a query sees, None for all.
        full_layers: the first so many layers, that see all keys though there is a window (Qwen 2).
        bias: on queries, keys and values; out_bias: on the attention's output; mlp_bias: on the MLP's three products.
        activation: of the MLP's gate, by its name in `axon.nn.ACTIVATIONS`.
        qk_norm: RMSNorm of each head's queries and keys.
    """

    rope: Rope = Rope()
    nope_every: int | None = None
    window: int | None = None
    full_layers: int = 0
    bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    qk_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "window", "nope_every")
        check_range(self, f"[0, {self.layers})", "full_layers")
        if self.full_layers and (self.window is None or self.nope_every is not None):
            raise UserError(f"Llama.full_layers is {self.full_layers}, which needs a window and no nope_every")
        check_activation(self)

    def segments(self) -> list[Segment]:
        """One kind of block, periods of `rope…, nope`, or full layers and then local ones."""
        block = partial(Block, self)
        if self.full_layers:
            full = Segment(self.full_layers, full=Block(replace(self, window=None, full_layers=0)))
            return [full, Segment(self.layers - self.full_layers, local=block())]
        if self.nope_every is None:
            return [Segment(self.layers, block=block())]
        return LayerPattern(self.layers, self.nope_every - 1, "rope", "nope").segments(
            block, partial(Block, self, rotates=False)
        )


class Block(MLPBlock):
    """Attention and a gated MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: Llama, rotates: bool = True):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        mask = Causal() & SameDocument()
        if config.window is not None:
            mask = mask & Window(config.window)
        qk_norm = (lambda heads: config.norm("head_dim")) if config.qk_norm else None
        self.attention_norm = config.norm("embed")
        rope = config.rope if rotates else None
        self.attention = Attention(
            dims, mask, rope=rope, bias=config.bias, out_bias=config.out_bias, qk_norm=qk_norm, out_scale=scale
        )
        self.mlp_norm = config.norm("embed")
        self.mlp = GatedMLP(dims, activation=gated(config.activation), out_scale=scale, bias=config.mlp_bias)


EMBEDDING = (
    Row("model.embed_tokens.weight", "embedding/table"),
    Row("model.norm.weight", "norm/scale"),
    Row("lm_head.weight", "head", "vocab embed"),
)
BIASES = (
    Row("self_attn.q_proj.bias", "attention/query_bias", "(heads head_dim)"),
    Row("self_attn.k_proj.bias", "attention/key_bias", "(kv_heads head_dim)"),
    Row("self_attn.v_proj.bias", "attention/value_bias", "(kv_heads head_dim)"),
    Row("self_attn.o_proj.bias", "attention/out_bias"),
)
ATTENTION = (
    Row("input_layernorm.weight", "attention_norm/scale"),
    Row("self_attn.q_proj.weight", "attention/query", "(heads head_dim) embed"),
    Row("self_attn.k_proj.weight", "attention/key", "(kv_heads head_dim) embed"),
    Row("self_attn.v_proj.weight", "attention/value", "(kv_heads head_dim) embed"),
    Row("self_attn.o_proj.weight", "attention/out", "embed (heads head_dim)"),
    *BIASES,
    Row("self_attn.q_norm.weight", "attention/query_norm/scale"),
    Row("self_attn.k_norm.weight", "attention/key_norm/scale"),
)
MLP = (
    Row("mlp.gate_proj.weight", "mlp/gate", "mlp embed"),
    Row("mlp.up_proj.weight", "mlp/up", "mlp embed"),
    Row("mlp.down_proj.weight", "mlp/down", "embed mlp"),
    Row("mlp.gate_proj.bias", "mlp/gate_bias"),
    Row("mlp.up_proj.bias", "mlp/up_bias"),
    Row("mlp.down_proj.bias", "mlp/down_bias"),
)
ROWS = EMBEDDING + in_layers((*ATTENTION, Row("post_attention_layernorm.weight", "mlp_norm/scale"), *MLP))
PHI_ROWS = EMBEDDING + in_layers(
    (
        Row("input_layernorm.weight", "attention_norm/scale"),
        Row("self_attn.qkv_proj.weight", "attention/query", "[heads head_dim] embed"),
        Row("self_attn.qkv_proj.weight", "attention/key", "[kv_heads head_dim] embed"),
        Row("self_attn.qkv_proj.weight", "attention/value", "[kv_heads head_dim] embed"),
        Row("self_attn.o_proj.weight", "attention/out", "embed (heads head_dim)"),
        Row("post_attention_layernorm.weight", "mlp_norm/scale"),
        Row("mlp.gate_up_proj.weight", "mlp/gate", "[mlp] embed"),
        Row("mlp.gate_up_proj.weight", "mlp/up", "[mlp] embed"),
        Row("mlp.down_proj.weight", "mlp/down", "embed mlp"),
    )
)

HEADS = SameAs("num_attention_heads")


def sizes(
    vocab: int, embed: int, mlp: int, layers: int, heads: int, kv_heads: int | SameAs, width: int | None = None
) -> tuple[Field, ...]:
    """Fields of sizes, with a family's defaults; `width`: of a head, None: embed / heads."""
    return (
        Field("vocab_size", "vocab", SIZE, vocab),
        Field("hidden_size", "embed", SIZE, embed),
        Field("intermediate_size", "mlp", SIZE, mlp),
        Field("num_hidden_layers", "layers", LAYERS, layers),
        Field("num_attention_heads", "heads", SIZE, heads),
        Field("num_key_value_heads", "kv_heads", SIZE | NULL, kv_heads, null=HEADS),
        Field("head_dim", "head_dim", SIZE if width else SIZE | NULL, width, unset=head_dim),
    )


def _read_divisible(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers opens some architectures so alone, whatever their head_dim is."""
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    if embed % heads:
        raise UserError(f"config.json: hidden_size is {embed}; must be divisible by num_attention_heads, {heads}")
    return {}


def _padding(token: int) -> Converted:
    """`token`: the id that transformers pads with where config.json names none, and refuses if there is none such."""
    return Converted(
        lambda config: {},
        lambda model: {} if token < model.vocab else {"pad_token_id": None},
        {"pad_token_id": TOKEN_ID},
    )


def _read_nope(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")
    rotates = [int((layer + 1) % every != 0) for layer in range(layers)] if rotates is None else rotates[:layers]
    every = rotates.index(0) + 1 if 0 in rotates else None
    if rotates != [int(not every or (layer + 1) % every != 0) for layer in range(layers)]:
        raise UserError(
            f"config.json: no_rope_layers is {shown(rotates)}, of {layers} layers; models.llama has one such layer in "
            "each so many"
        )
    return {"nope_every": every}


def _write_nope(model: Llama) -> dict[str, Any]:
    every = model.nope_every or model.layers + 1
    rotates = [int((layer + 1) % every != 0) for layer in range(model.layers)]
    return {"no_rope_layers": rotates, "no_rope_layer_interval": every}


NOPE = {"no_rope_layers": list_of(one_of(0, 1)) | NULL, "no_rope_layer_interval": LAYERS}
ACTIVATION = one_of(*ACTIVATIONS)
SILU = Field("hidden_act", "activation", ACTIVATION, "silu")
BIAS = Converted(
    lambda config: dict.fromkeys(("bias", "out_bias"), config.get("attention_bias", False)),
    lambda model: {"attention_bias": model.out_bias},
    {"attention_bias": FLAG},
)
MLP_BIAS = Field("mlp_bias", "mlp_bias", FLAG, False)
NO_BIAS, NO_MLP_BIAS, NO_WINDOW = (
    Constant(name, False) for name in ("attention_bias", "mlp_bias", "use_sliding_window")
)
NO_SLIDING_WINDOW = Constant("sliding_window", None)
ALL_FULL = uniform_layers()
DIVISIBLE = Converted(_read_divisible, lambda model: {}, {})
LLAMA = (
    *sizes(32_000, 4096, 11_008, 32, 32, HEADS),
    DIVISIBLE,
    rope_field(RopeRules(width="filled")),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
    BIAS,
    MLP_BIAS,
    NO_SLIDING_WINDOW,
    ALL_FULL,
)
MISTRAL = (
    *sizes(32_000, 4096, 14_336, 32, 32, 8),
    rope_field(RopeRules(positions=131_072, width="filled")),
    windowed_layers(switch=False),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
)
QWEN2 = (
    *sizes(151_936, 4096, 22_016, 32, 32, 32),
    rope_field(RopeRules(positions=32_768, layered=True)),
    windowed_layers(switch=True),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
)
QWEN3 = (
    *sizes(151_936, 4096, 22_016, 32, 32, 32, 128),
    *(one for one in QWEN2 if not isinstance(one, Field) or one.ours in ("norm_eps", "tied", "activation")),
    BIAS,
)
SMOLLM3 = (
    *sizes(128_256, 2048, 11_008, 36, 16, 4),
    _padding(128_004),
    rope_field(RopeRules(2_000_000.0, positions=32_768, layered=True)),
    Converted(_read_nope, _write_nope, NOPE),
    NO_WINDOW,
    *ignored("sliding_window", "max_window_layers"),
    ALL_FULL,
    Field("rms_norm_eps", "norm_eps", EPS, 1e-6),
    Field("tie_word_embeddings", "tied", FLAG, True),
    SILU,
    BIAS,
    MLP_BIAS,
)
PHI3 = (
    *sizes(32_064, 3072, 8192, 32, 32, HEADS),
    _padding(32_000),
    rope_field(RopeRules(positions=4096, phi=True)),
    Field("sliding_window", "window", SIZE | NULL, None),
    uniform_layers("sliding_window"),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-5),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
    *ignored("resid_pdrop", "embd_pdrop"),
)
NO_BIASES = {"bias": False, "out_bias": False, "mlp_bias": False}
UNIFORM = {"qk_norm": False, "nope_every": None}
EVERY, NO_MLP = UNIFORM | {"full_layers": 0}, UNIFORM | {"mlp_bias": False}
HUGGING_FACE = (
    Architecture("LlamaForCausalLM", "llama", Llama, ROWS, LLAMA, EVERY | {"window": None}),
    Architecture("MistralForCausalLM", "mistral", Llama, ROWS, MISTRAL, NO_BIASES | UNIFORM),
    Architecture("Qwen2ForCausalLM", "qwen2", Llama, ROWS, QWEN2, NO_MLP | {"bias": True, "out_bias": False}),
    Architecture("Qwen3ForCausalLM", "qwen3", Llama, ROWS, QWEN3, NO_MLP | {"qk_norm": True}),
    Architecture(
        "SmolLM3ForCausalLM", "smollm3", Llama, ROWS, SMOLLM3, {"window": None, "full_layers": 0, "qk_norm": False}
    ),
    Architecture("Phi3ForCausalLM", "phi3", Llama, PHI_ROWS, PHI3, EVERY | NO_BIASES),
)
