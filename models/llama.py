"""Llama 2 and 3, and the models that differ from it by a field: Mistral, Qwen 2 and 3, Phi 3 and 4, SmolLM 3."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import RESUMABLE
from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import Alternation, Attention, Auxiliary, Depth, GatedMLP, LanguageModel, RMSNorm, Rope, Segment
from axon.nn.hugging_face import Architecture, Constant, Converted, Field, Of, Row, in_layers
from axon.nn.hugging_face_rope import rope_field
from axon.nn.language_model import RESIDUAL
from axon.nn.remat import RematByKind, remat_by_kind
from axon.nn.sizes import check_heads, decoder_dims

__all__ = ["HUGGING_FACE", "Llama"]


@dataclass(frozen=True)
class Llama:
    """Touvron et al. (arXiv:2307.09288) and Llama team (2407.21783); Mistral's window (2310.06825), Qwen 2's bias
    (2407.10671), Qwen 3's QK norm (2505.09388), Phi-3's LongRoPE (2404.14219), SmolLM3's layers that do not rotate.

    Args:
        vocab, embed, layers, heads, kv_heads, mlp: sizes; head_dim: embed / heads by default.
        rope: rotary frequencies. nope_every: of so many layers the last does not rotate (NoPE: Yang et al.,
            arXiv:2501.18795); None: all do. window: keys a query sees, None for all. norm_eps: of RMSNorm.
        bias: on queries, keys and values. qk_norm: RMSNorm of each head's queries and keys. tied: one matrix for
            embedding and head.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        remat: what the backward recomputes or offloads, see `axon.nn.remat`. unroll: see `axon.nn.Depth`.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None
    rope: Rope = Rope()
    nope_every: int | None = None
    window: int | None = None
    norm_eps: float = 1e-5
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    vocab_multiple: int = 1
    remat: RematByKind = field(default="none", metadata=RESUMABLE)
    unroll: bool | None = field(default=None, metadata=RESUMABLE)

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "layers", "heads", "kv_heads", "mlp", "head_dim", "window")
        check_range(self, "[1, 2**31)", *sizes, "nope_every")
        check_range(self, "[0, inf)", "norm_eps")
        check_heads(self)
        names = Block.remat_names + Attention.remat_names + GatedMLP.remat_names + RMSNorm.remat_names
        remat_by_kind(self.remat, dict.fromkeys(self.kinds, names))

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        return decoder_dims(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of block, by which `remat` can be given."""
        return ("block",) if self.nope_every is None else self._alternation.kinds

    @property
    def _alternation(self) -> Alternation:
        assert self.nope_every is not None
        return Alternation(self.layers, self.nope_every - 1, "rope", "nope")

    def segments(self) -> list[Segment]:
        """One kind of block, or periods of `rope…, nope`."""
        block = partial(Block, self)
        if self.nope_every is None:
            return [Segment(self.layers, block=block())]
        return self._alternation.segments(block, partial(Block, self, rotates=False))

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        return LanguageModel(
            self.dims,
            Depth(*self.segments(), remat=self.remat, unroll=self.unroll),
            RMSNorm("embed", self.dims, self.norm_eps),
            tied=self.tied,
            embedding_stddev=self.embed**-0.5,
            vocab=self.vocab,
        )


class Block(nnx.Module):
    """Attention and a gated MLP, each on the normalised residual stream and added to it."""

    remat_names = ("residual",)
    """The activations that a remat policy can keep by name: the stream after attention."""

    def __init__(self, config: Llama, rotates: bool = True):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        mask = Causal() & SameDocument()
        if config.window is not None:
            mask = mask & Window(config.window)
        qk_norm = (lambda heads: RMSNorm("head_dim", dims, config.norm_eps)) if config.qk_norm else None
        self.attention_norm = RMSNorm("embed", dims, config.norm_eps)
        rope = config.rope if rotates else None
        self.attention = Attention(dims, mask, rope=rope, bias=config.bias, qk_norm=qk_norm, out_scale=scale)
        self.mlp_norm = RMSNorm("embed", dims, config.norm_eps)
        self.mlp = GatedMLP(dims, out_scale=scale)

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = checkpoint_name(x + out, "residual")
        x = x + self.mlp(self.mlp_norm(x, RESIDUAL))
        return x, cache, Auxiliary()

    def cache_specs(self, batch, length):
        return self.attention.cache_specs(batch, length)


EMBEDDING = (
    Row("model.embed_tokens.weight", "embedding/table"),
    Row("model.norm.weight", "norm/scale"),
    Row("lm_head.weight", "head", "vocab embed"),
)
ATTENTION = (
    Row("input_layernorm.weight", "attention_norm/scale"),
    Row("self_attn.q_proj.weight", "attention/query", "(heads head_dim) embed"),
    Row("self_attn.k_proj.weight", "attention/key", "(kv_heads head_dim) embed"),
    Row("self_attn.v_proj.weight", "attention/value", "(kv_heads head_dim) embed"),
    Row("self_attn.o_proj.weight", "attention/out", "embed (heads head_dim)"),
    Row("self_attn.q_proj.bias", "attention/query_bias", "(heads head_dim)"),
    Row("self_attn.k_proj.bias", "attention/key_bias", "(kv_heads head_dim)"),
    Row("self_attn.v_proj.bias", "attention/value_bias", "(kv_heads head_dim)"),
    Row("self_attn.o_proj.bias", "attention/out_bias"),
    Row("self_attn.q_norm.weight", "attention/query_norm/scale"),
    Row("self_attn.k_norm.weight", "attention/key_norm/scale"),
)
MLP = (
    Row("mlp.gate_proj.weight", "mlp/gate", "mlp embed"),
    Row("mlp.up_proj.weight", "mlp/up", "mlp embed"),
    Row("mlp.down_proj.weight", "mlp/down", "embed mlp"),
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

SIZES = (
    Field("vocab_size", "vocab"),
    Field("hidden_size", "embed"),
    Field("num_hidden_layers", "layers"),
    Field("num_attention_heads", "heads"),
    Field("num_key_value_heads", "kv_heads", Of("num_attention_heads")),
    Field("intermediate_size", "mlp"),
    Field("head_dim", "head_dim", None),
)
FIELDS = (
    *SIZES,
    rope_field(),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("tie_word_embeddings", "tied", False),
    Constant("hidden_act", "silu"),
)
NO_BIAS = Constant("attention_bias", False)
PLAIN = {"window": None, "bias": False, "qk_norm": False, "nope_every": None}
WINDOWED = {"bias": False, "qk_norm": False, "nope_every": None}
NO_WINDOW = Constant("use_sliding_window", False, moot=("sliding_window", "max_window_layers"))
WINDOW = Field("sliding_window", "window", 4096)
NO_MLP_BIAS = Constant("mlp_bias", False)


def _read_nope(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    every = rotates.index(0) + 1 if 0 in rotates else None
    if every and any(bool(one) != bool((layer + 1) % every) for layer, one in enumerate(rotates)):
        raise UserError(f"config.json: no_rope_layers is {rotates}; models.llama has one such layer in each so many")
    return {"nope_every": every}


def _write_nope(model: Llama) -> dict[str, Any]:
    every = model.nope_every or model.layers + 1
    rotates = [int((layer + 1) % every != 0) for layer in range(model.layers)]
    return {"no_rope_layers": rotates, "no_rope_layer_interval": every}


SMOLLM3 = (
    *SIZES,
    rope_field(theta=2_000_000.0),
    Converted(_read_nope, _write_nope, ("no_rope_layers", "no_rope_layer_interval")),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("tie_word_embeddings", "tied", True),
    Constant("hidden_act", "silu"),
    NO_BIAS,
    NO_MLP_BIAS,
    NO_WINDOW,
)
PHI3 = (
    *SIZES,
    rope_field(long=True),
    Field("sliding_window", "window", None),
    Field("rms_norm_eps", "norm_eps", 1e-5),
    Field("tie_word_embeddings", "tied", False),
    Constant("hidden_act", "silu"),
)
SMOL = {name: value for name, value in PLAIN.items() if name != "nope_every"}

HUGGING_FACE = (
    Architecture("LlamaForCausalLM", "llama", Llama, ROWS, (*FIELDS, NO_BIAS, NO_MLP_BIAS), PLAIN),
    Architecture("MistralForCausalLM", "mistral", Llama, ROWS, (*FIELDS, WINDOW), WINDOWED),
    Architecture("Qwen2ForCausalLM", "qwen2", Llama, ROWS, (*FIELDS, NO_WINDOW), PLAIN | {"bias": True}),
    Architecture("Qwen3ForCausalLM", "qwen3", Llama, ROWS, (*FIELDS, NO_BIAS, NO_WINDOW), PLAIN | {"qk_norm": True}),
    Architecture("SmolLM3ForCausalLM", "smollm3", Llama, ROWS, SMOLLM3, SMOL),
    Architecture("Phi3ForCausalLM", "phi3", Llama, PHI_ROWS, PHI3, WINDOWED, silent=("resid_pdrop", "embd_pdrop")),
)
