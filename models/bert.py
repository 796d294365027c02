"""BERT: an encoder that predicts masked tokens from both sides."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jax import Array

from axon.axes import add, einsum, shard
from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import SIZE, one_of
from axon.kernels.attention import SameDocument
from axon.nn import (
    ACTIVATIONS,
    MLP,
    Attention,
    Auxiliary,
    Depth,
    Dims,
    Dropout,
    Embedding,
    Inputs,
    LayerNorm,
    Param,
    Segment,
    check_activation,
    constant,
)
from axon.nn.flops import paths_in
from axon.nn.hugging_face import (
    EPS,
    LAYERS,
    RATE,
    Architecture,
    Constant,
    Copy,
    Field,
    Ignored,
    Row,
    ignored,
    in_layers,
)
from axon.nn.language_model import RESIDUAL
from axon.nn.param import normal, parameters
from axon.nn.sizes import check_sizes, padded

__all__ = ["HUGGING_FACE", "Bert"]


@dataclass(frozen=True)
class Bert:
    """Devlin et al. (arXiv:1810.04805), without its second task, the next sentence. Train it by `MaskedToken`.

    Args:
        vocab, embed, layers, heads, mlp: sizes; positions: the longest sequence. types: of tokens, as of the first and
            the second sentence. norm_eps: of LayerNorm. activation: of MLPs and head, by its name in
            `axon.nn.ACTIVATIONS`.
        dropout: fraction of activations dropped after the embedding and after each half of a block, in training.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        head: whether it predicts masked tokens; without, it is an encoder alone, as those that embed sentences are.
        pooler: whether it keeps the `Pooler` that published files may have, as it was: a classifier begins with it
            (`TextClassifier`), nothing else uses it.
    """

    vocab: int = 30522
    embed: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    positions: int = 512
    types: int = 2
    norm_eps: float = 1e-12
    activation: str = "gelu"
    dropout: float = 0.1
    vocab_multiple: int = 1
    head: bool = True
    pooler: bool = False

    def __post_init__(self):
        check_sizes(self, "vocab", "vocab_multiple", "embed", "layers", "heads", "mlp", "positions", "types")
        check_range(self, "[0, 1)", "dropout")
        check_activation(self)
        if self.embed % self.heads:
            raise UserError(f"Bert: embed {self.embed} is not divisible by heads {self.heads}")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        sizes = field_values(self, ("embed", "heads", "mlp", "positions", "types"))
        own = {"kv_heads": self.heads, "head_dim": self.embed // self.heads, "embed_out": self.embed}
        return sizes | own | {"vocab": padded(self.vocab, self.vocab_multiple)}

    def build(self) -> "BertEncoder":
        """The module, its parameters not yet initialised."""
        return BertModel(self) if self.head else BertEncoder(self)


EMBEDDINGS = ("embedding", "positions/", "types/")


class BertEncoder(nnx.Module):
    """Token ids in, of each position what the whole text makes of it out."""

    def __init__(self, config: Bert):
        dims = config.dims
        self.embedding = Embedding("vocab", dims, 0.02)
        self.positions = Embedding("positions", dims, 0.02)
        self.types = Embedding("types", dims, 0.02)
        self.embedding_norm = LayerNorm("embed", dims, config.norm_eps)
        self.dropout = Dropout(config.dropout, "embedding")
        self.layers = Depth(Segment(config.layers, block=Block(config)))
        if config.pooler:
            self.pooler = Pooler(dims, trained=False)
        self.dims, self.vocab, self.max_length = dims, config.vocab, config.positions

    def hidden(self, inputs: Inputs, types: Array | None = None) -> tuple[Array, Auxiliary]:
        """The last layer's output, `batch seq.residual embed`, and the layers' auxiliary terms.

        `types[batch seq]`: of the tokens, int32; None: all are of type 0.
        """
        length = inputs.tokens.shape[1]
        if length > self.dims["positions"]:
            raise UserError(
                f"Bert: sequences of {length} positions, and embeddings for {self.dims['positions']}; raise "
                "Bert.positions, or shorten the sequences (Data.seq)"
            )
        types = jnp.zeros_like(inputs.tokens) if types is None else types
        x = self.embedding(inputs.tokens) + self.types(types) + self.positions(inputs.positions)
        x = self.dropout(self.embedding_norm(x, RESIDUAL), inputs)
        x, _, auxiliary = self.layers(x, inputs)
        return x, auxiliary.within("layers")

    def flops_per_token(self, seq: int, frozen: Collection[str] = ()) -> int:
        """Model FLOPs of training on one token in a sequence of `seq`, forward and backward: of the layers. A head's,
        which sees few tokens, are left out."""
        below = any(path.startswith(EMBEDDINGS) and path not in frozen for path in parameters(self))
        return self.layers.training_flops(seq, paths_in("layers", frozen), below)[0]


class BertModel(BertEncoder):
    """An encoder with a head: a distribution over the ids of each masked position."""

    def __init__(self, config: Bert):
        super().__init__(config)
        dims = self.dims
        self.transform, self.transform_bias = Param("embed embed_out", dims), Param("embed_out", dims, constant(0.0))
        self.transform_norm = LayerNorm("embed", dims, config.norm_eps)
        self.activation = ACTIVATIONS[config.activation]
        self.output_bias = Param("vocab", dims, constant(0.0))

    def masked_logits(self, x: Array, places: str = "_places") -> Array:
        """`batch places vocab` float32 of `x[batch places embed]`, the hidden states of some positions of each
        sequence; `places` is the name of their axis."""
        embed = f"batch {places} embed"
        out = einsum(f"{embed}, embed embed_out -> {embed}_out", x, self.transform)
        out = self.activation(add(f"{embed}_out, embed_out -> {embed}_out", out, self.transform_bias))
        out = self.transform_norm(shard(out, embed), embed)
        of_vocab = f"batch {places} vocab"
        logits = einsum(f"{embed}, vocab embed -> {of_vocab}", out, self.embedding.table)
        logits = add(f"{of_vocab}, vocab -> {of_vocab}", logits, self.output_bias).astype(jnp.float32)
        ids = shard(jnp.arange(logits.shape[-1]), "vocab")
        return jnp.where(ids < self.vocab, logits, jnp.finfo(jnp.float32).min)


class Pooler(nnx.Module):
    """tanh(dense(x)), which a classifier reads at the first token of a text."""

    def __init__(self, dims: Dims, trained: bool = True):
        self.dense = Param("embed embed_out", dims, trained=trained)
        self.dense_bias = Param("embed_out", dims, constant(0.0), trained=trained)

    def __call__(self, x: Array) -> Array:  # batch seq.residual embed
        out = einsum(f"{RESIDUAL}, embed embed_out -> {RESIDUAL}_out", x, self.dense)
        out = add(f"{RESIDUAL}_out, embed_out -> {RESIDUAL}_out", out, self.dense_bias)
        return shard(jnp.tanh(out), RESIDUAL)


class BertClassifier(BertEncoder):
    """An encoder with a linear layer over its pooler: a distribution over classes of each text, at its first token."""

    on_top = ("pooler", "classifier", "classifier_bias")
    replaced = ("transform", "transform_bias", "transform_norm/scale", "transform_norm/bias", "output_bias")

    def __init__(self, config: Bert, classes: int):
        super().__init__(replace(config, pooler=False))
        self.dims |= {"classes": classes}
        self.pooler, self.pooled_dropout = Pooler(self.dims), Dropout(config.dropout, "pooled")
        self.classifier = Param("embed classes", self.dims, normal(0.02))
        self.classifier_bias = Param("classes", self.dims, constant(0.0))

    def pooled(self, x: Array, inputs: Inputs) -> Array:
        """What `classifier` makes logits of, `batch seq.residual embed`, of the last layer's output."""
        return self.pooled_dropout(self.pooler(x), inputs)


class Block(nnx.Module):
    """Attention to the whole document and an MLP, each added to the residual stream, which is then normalised."""

    def __init__(self, config: Bert):
        dims = config.dims
        self.attention = Attention(dims, SameDocument(), bias=True, out_bias=True)
        self.attention_norm = LayerNorm("embed", dims, config.norm_eps)
        self.mlp = MLP(dims, activation=ACTIVATIONS[config.activation])
        self.mlp_norm = LayerNorm("embed", dims, config.norm_eps)
        self.attention_dropout = Dropout(config.dropout, "attention")
        self.mlp_dropout = Dropout(config.dropout, "mlp")

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, _ = self.attention(x, inputs)
        x = self.attention_norm(x + self.attention_dropout(out, inputs), RESIDUAL)
        x = self.mlp_norm(x + self.mlp_dropout(self.mlp(x), inputs), RESIDUAL)
        return x, cache, Auxiliary()


def linear_rows(theirs: str, ours: str, axes: str, bias: str) -> tuple[Row, Row]:
    return Row(f"{theirs}.weight", ours, axes), Row(f"{theirs}.bias", f"{ours}_bias", bias)


def norm_rows(theirs: str, ours: str) -> tuple[Row, Row]:
    return Row(f"{theirs}.weight", f"{ours}/scale"), Row(f"{theirs}.bias", f"{ours}/bias")


def encoder_rows(prefix: str = "") -> tuple[Row, ...]:
    """The encoder's rows, with what their names begin with."""
    embeddings = f"{prefix}embeddings"
    return (
        Row(f"{embeddings}.word_embeddings.weight", "embedding/table"),
        Row(f"{embeddings}.position_embeddings.weight", "positions/table"),
        Row(f"{embeddings}.token_type_embeddings.weight", "types/table"),
        *norm_rows(f"{embeddings}.LayerNorm", "embedding_norm"),
        *linear_rows(f"{prefix}pooler.dense", "pooler/dense", "embed_out embed", "embed_out"),
        *in_layers(BLOCK, f"{prefix}encoder.layer.{{layer}}"),
    )


BLOCK = (
    *linear_rows("attention.self.query", "attention/query", "(heads head_dim) embed", "(heads head_dim)"),
    *linear_rows("attention.self.key", "attention/key", "(kv_heads head_dim) embed", "(kv_heads head_dim)"),
    *linear_rows("attention.self.value", "attention/value", "(kv_heads head_dim) embed", "(kv_heads head_dim)"),
    *linear_rows("attention.output.dense", "attention/out", "embed (heads head_dim)", "embed"),
    *norm_rows("attention.output.LayerNorm", "attention_norm"),
    *linear_rows("intermediate.dense", "mlp/up", "mlp embed", "mlp"),
    *linear_rows("output.dense", "mlp/down", "embed mlp", "embed"),
    *norm_rows("output.LayerNorm", "mlp_norm"),
)
HEAD = (
    *linear_rows("cls.predictions.transform.dense", "transform", "embed_out embed", "embed_out"),
    *norm_rows("cls.predictions.transform.LayerNorm", "transform_norm"),
    Row("cls.predictions.bias", "output_bias"),
)
FIELDS = (
    Field("vocab_size", "vocab", SIZE, 30522),
    Field("hidden_size", "embed", SIZE, 768),
    Field("num_hidden_layers", "layers", LAYERS, 12),
    Field("num_attention_heads", "heads", SIZE, 12),
    Field("intermediate_size", "mlp", SIZE, 3072),
    Field("max_position_embeddings", "positions", SIZE, 512),
    Field("type_vocab_size", "types", SIZE, 2),
    Field("layer_norm_eps", "norm_eps", EPS, 1e-12),
    Field("hidden_dropout_prob", "dropout", RATE, 0.1),
    Field("hidden_act", "activation", one_of(*ACTIVATIONS), "gelu"),
    Constant("is_decoder", False),
    Constant("add_cross_attention", False),
    Constant("position_embedding_type", "absolute", also=(None,)),
    *ignored("attention_probs_dropout_prob", "matryoshka_dimensions", "is_matryoshka"),
)
TIED = Constant("tie_word_embeddings", True)
HUGGING_FACE = (
    Architecture(
        "BertForMaskedLM",
        "bert",
        Bert,
        encoder_rows("bert.") + HEAD,
        (*FIELDS, TIED),
        {"head": True},
        copies=(
            Copy("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            Copy("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
        unused=("bert.pooler.*", "cls.seq_relationship.*", "*.position_ids"),
        present={"pooler": "bert.pooler.dense.weight"},
    ),
    Architecture(
        "BertModel",
        "bert",
        Bert,
        encoder_rows(),
        (*FIELDS, Ignored("tie_word_embeddings")),
        {"head": False},
        copies=(),
        unused=("pooler.*", "*.position_ids"),
        present={"pooler": "pooler.dense.weight"},
    ),
)
