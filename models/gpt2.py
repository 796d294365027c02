"""GPT-2: learned positions, LayerNorm, biases everywhere, dropout."""

from dataclasses import dataclass

from jax.ad_checkpoint import checkpoint_name

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import FLAG, NULL, SIZE, one_of
from axon.kernels.attention import Causal, SameDocument
from axon.nn import (
    ACTIVATIONS,
    MLP,
    Attention,
    Auxiliary,
    Depth,
    Dropout,
    Embedding,
    Inputs,
    LanguageModel,
    LayerNorm,
    Segment,
    check_activation,
)
from axon.nn.block import Block as AttentionBlock
from axon.nn.hugging_face import (
    EPS,
    LAYERS,
    RATE,
    Architecture,
    Constant,
    Converted,
    Copy,
    Field,
    Row,
    ignored,
    in_layers,
)
from axon.nn.language_model import RESIDUAL
from axon.nn.sizes import check_sizes, padded

__all__ = ["GPT2", "HUGGING_FACE"]


@dataclass(frozen=True)
class GPT2:
    """Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

    Args:
        vocab, embed, layers, heads, mlp: sizes; positions: the longest sequence. norm_eps: of LayerNorm.
        dropout: fraction of activations dropped after the embedding and after each half of a block, in training.
        activation: of the MLP, by its name in `axon.nn.ACTIVATIONS`. tied: one matrix for embedding and head.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
    """

    vocab: int = 50257
    embed: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    positions: int = 1024
    norm_eps: float = 1e-5
    dropout: float = 0.1
    tied: bool = True
    activation: str = "gelu_new"
    vocab_multiple: int = 1

    def __post_init__(self):
        check_sizes(self, "vocab", "vocab_multiple", "embed", "layers", "heads", "mlp", "positions")
        check_range(self, "[0, 1)", "dropout")
        check_activation(self)
        if self.embed % self.heads:
            raise UserError(f"GPT2: embed {self.embed} is not divisible by heads {self.heads}")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        sizes = field_values(self, ("embed", "heads", "mlp", "positions"))
        own = {"kv_heads": self.heads, "vocab": padded(self.vocab, self.vocab_multiple)}
        return sizes | own | {"head_dim": self.embed // self.heads}

    def build(self) -> "GPT2Model":
        """The module, its parameters not yet initialised."""
        return GPT2Model(self)


class GPT2Model(LanguageModel):
    """A language model whose residual stream begins with token and position embeddings."""

    def __init__(self, config: GPT2):
        dims = config.dims
        super().__init__(
            dims,
            Depth(Segment(config.layers, block=Block(config))),
            LayerNorm("embed", dims, config.norm_eps),
            tied=config.tied,
            embedding_stddev=0.02,
            vocab=config.vocab,
        )
        self.positions = Embedding("positions", dims, 0.01)
        self.dropout = Dropout(config.dropout, "embedding")
        self.max_length = config.positions

    def embed(self, inputs: Inputs):
        length = inputs.tokens.shape[1]
        if length > self.dims["positions"]:
            raise UserError(
                f"GPT2: sequences of {length} positions, and embeddings for {self.dims['positions']}; raise "
                "GPT2.positions, or shorten the sequences (Data.seq)"
            )
        return self.dropout(super().embed(inputs) + self.positions(inputs.positions), inputs)


class Block(AttentionBlock):
    """Attention and an MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: GPT2):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm = LayerNorm("embed", dims, config.norm_eps)
        self.attention = Attention(dims, Causal() & SameDocument(), bias=True, out_bias=True, out_scale=scale)
        self.mlp_norm = LayerNorm("embed", dims, config.norm_eps)
        self.mlp = MLP(dims, out_scale=scale, activation=ACTIVATIONS[config.activation])
        self.attention_dropout = Dropout(config.dropout, "attention")
        self.mlp_dropout = Dropout(config.dropout, "mlp")

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = checkpoint_name(x + self.attention_dropout(out, inputs), "residual")
        out = self.mlp(self.mlp_norm(x, RESIDUAL))
        return x + self.mlp_dropout(out, inputs), cache, Auxiliary()


ROWS = (
    Row("transformer.wte.weight", "embedding/table"),
    Row("lm_head.weight", "head", "vocab embed"),
    Row("transformer.wpe.weight", "positions/table"),
    Row("transformer.ln_f.weight", "norm/scale"),
    Row("transformer.ln_f.bias", "norm/bias"),
    *in_layers(
        (
            Row("ln_1.weight", "attention_norm/scale"),
            Row("ln_1.bias", "attention_norm/bias"),
            Row("attn.c_attn.weight", "attention/query", "embed [heads head_dim]"),
            Row("attn.c_attn.weight", "attention/key", "embed [kv_heads head_dim]"),
            Row("attn.c_attn.weight", "attention/value", "embed [kv_heads head_dim]"),
            Row("attn.c_attn.bias", "attention/query_bias", "[heads head_dim]"),
            Row("attn.c_attn.bias", "attention/key_bias", "[kv_heads head_dim]"),
            Row("attn.c_attn.bias", "attention/value_bias", "[kv_heads head_dim]"),
            Row("attn.c_proj.weight", "attention/out", "(heads head_dim) embed"),
            Row("attn.c_proj.bias", "attention/out_bias"),
            Row("ln_2.weight", "mlp_norm/scale"),
            Row("ln_2.bias", "mlp_norm/bias"),
            Row("mlp.c_fc.weight", "mlp/up"),
            Row("mlp.c_fc.bias", "mlp/up_bias"),
            Row("mlp.c_proj.weight", "mlp/down"),
            Row("mlp.c_proj.bias", "mlp/down_bias"),
        ),
        "transformer.h.{layer}",
    ),
)
FIELDS = (
    Field("vocab_size", "vocab", SIZE, 50257),
    Field("n_embd", "embed", SIZE, 768, also=("hidden_size",)),
    Field("n_layer", "layers", LAYERS, 12, also=("num_hidden_layers",)),
    Field("n_head", "heads", SIZE, 12, also=("num_attention_heads",)),
    Converted(
        lambda config: {"mlp": config.get("n_inner") or 4 * config["n_embd"]},
        lambda model: {"n_inner": model.mlp},
        {"n_inner": SIZE | NULL},
    ),
    Field("n_positions", "positions", SIZE, 1024, also=("max_position_embeddings",)),
    Field("layer_norm_epsilon", "norm_eps", EPS, 1e-5),
    Field("resid_pdrop", "dropout", RATE, 0.1),
    Field("activation_function", "activation", one_of(*ACTIVATIONS), "gelu_new"),
    Constant("scale_attn_weights", True),
    Constant("scale_attn_by_inverse_layer_idx", False),
    Constant("add_cross_attention", False),
    Field("tie_word_embeddings", "tied", FLAG, True),
    *ignored("attn_pdrop", "embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_activation"),
    *ignored("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
HUGGING_FACE = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2,
        ROWS,
        FIELDS,
        copies=(Copy("lm_head.weight", "transformer.wte.weight", {"tied": False}),),
        unused=("*h.*.attn.bias", "*h.*.attn.masked_bias"),
        optional_prefix="transformer.",
    ),
)
