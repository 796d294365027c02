"""T5: an encoder–decoder with a relative position bias."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import COUNT, FLAG, NULL, SIZE, one_of, shown
from axon.kernels.attention import Causal, Mask, SameDocument
from axon.nn import (
    ACTIVATIONS,
    MLP,
    Attention,
    Auxiliary,
    CrossAttention,
    Depth,
    Dropout,
    Embedding,
    GatedMLP,
    Head,
    Inputs,
    Param,
    RelativeBias,
    RMSNorm,
    Segment,
    check_activation,
    gated,
)
from axon.nn.cache import CacheSpec
from axon.nn.flops import paths_in, weight_flops
from axon.nn.hugging_face import (
    EPS,
    LAYERS,
    RATE,
    TOKEN_ID,
    Architecture,
    Converted,
    Copy,
    Field,
    Row,
    SameAs,
    ignored,
    in_layers,
)
from axon.nn.kv_cache import positions_of
from axon.nn.language_model import RESIDUAL
from axon.nn.param import parameters
from axon.nn.sizes import padded

__all__ = ["HUGGING_FACE", "T5"]


@dataclass(frozen=True)
class T5:
    """Raffel et al. (arXiv:1910.10683); gated and untied it is T5 1.1. Train it by `SpanCorruption`.

    Args:
        vocab, embed, heads, head_dim, mlp: sizes; encoder_layers, decoder_layers: depth.
        buckets, max_distance: of the relative position bias, see `axon.nn.RelativeBias`.
        gated: activation(gate)·up (T5 1.1) rather than activation(up); activation: its name in `axon.nn.ACTIVATIONS`,
            gelu_new and relu by default. tied: one matrix for embedding and head. scaled: whether the head sees the
            decoder's output divided by √embed; as `tied` by default. norm_eps: of RMSNorm.
        start_id: what the decoder is given first, to write after.
        dropout: fraction of activations dropped after the embeddings and after each part of a block, in training.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
    """

    vocab: int = 32128
    embed: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 12
    heads: int = 12
    head_dim: int = 64
    mlp: int = 2048
    buckets: int = 32
    max_distance: int = 128
    gated: bool = True
    activation: str | None = None
    tied: bool = False
    scaled: bool | None = None
    norm_eps: float = 1e-6
    start_id: int = 0
    dropout: float = 0.1
    vocab_multiple: int = 1

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "encoder_layers", "decoder_layers", "heads", "head_dim", "mlp")
        check_range(self, "[1, 2**31)", *sizes)
        check_range(self, "[1, 2**16]", "encoder_layers", "decoder_layers")
        check_range(self, "[4, 2**31)", "buckets")
        check_range(self, f"[0, {self.vocab})", "start_id")
        check_range(self, "[0, inf)", "norm_eps")
        check_range(self, "[0, 1)", "dropout")
        if self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise UserError(
                f"T5: buckets {self.buckets} must be even, and max_distance {self.max_distance} above half of that"
            )
        check_activation(self)

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        sizes = field_values(self, ("embed", "heads", "head_dim", "mlp", "buckets"))
        return sizes | {"kv_heads": self.heads, "vocab": padded(self.vocab, self.vocab_multiple)}

    @property
    def norm(self) -> partial[RMSNorm]:
        """RMSNorm with all arguments."""
        return partial(RMSNorm, "embed", self.dims, self.norm_eps)

    def build(self) -> "T5Model":
        """The module, its parameters not yet initialised."""
        return T5Model(self)


def activation_of(config: T5) -> str:
    """The activation of its MLPs, by name."""
    return config.activation or ("gelu_new" if config.gated else "relu")


def is_scaled(config: T5) -> bool:
    """Whether a head sees the decoder's output divided by √embed."""
    return config.tied if config.scaled is None else config.scaled


class T5Model(nnx.Module):
    """Token ids in, and those that a decoder has written so far; a distribution over its next id out."""

    max_length: int | None = None
    """See `axon.nn.LanguageModel`: there is room for any number of positions."""
    has_mtp = False

    def __init__(self, config: T5):
        dims = config.dims
        self.embedding = Embedding("vocab", dims, 1.0)
        self.encoder = _Stack(config, "encoder", config.encoder_layers)
        self.decoder = _Stack(config, "decoder", config.decoder_layers)
        if not config.tied:
            self.head = Param("embed vocab", dims)
        self.tied, self.dims, self.vocab, self.start_id = config.tied, dims, config.vocab, config.start_id
        self.scaled = is_scaled(config)

    def encode(self, inputs: Inputs) -> tuple[Array, Auxiliary]:
        """`batch seq.residual embed`, and the layers' auxiliary terms."""
        x, _, auxiliary = self.encoder(self.embedding(inputs.tokens), inputs)
        return x, auxiliary.within("encoder")

    def decode(self, inputs: Inputs, encoded: Array, documents: Array | None) -> tuple[Array, Auxiliary]:
        """What `output` predicts the next ids from, `batch seq.residual embed`, and the layers' auxiliary terms.

        `encoded`: by `encode`, of sequences of any length; `documents`: which document each of its positions is of.
        """
        x, _, auxiliary = self.hidden(replace(inputs, encoded=encoded, encoded_documents=documents))
        return x, auxiliary

    def encoded_states(self, encoded: Array, lens: Array) -> dict[str, dict[str, Array]]:
        """By kind of block what a cache has of `encoded`, by `encode`: each layer's keys and values; the first
        `lens[batch]` positions of each sequence are real."""
        states = self.layers.each_layer("decoder", lambda block: block.cross.encoded_states(encoded, lens))
        return {"decoder": states}

    def hidden(self, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        """As `decode`, of a text that `inputs` or `cache` has, which comes back with the tokens of `inputs` in it."""
        x, cache, auxiliary = self.decoder(self.embedding(inputs.tokens), inputs, cache)
        scale = self.dims["embed"] ** -0.5 if self.scaled else 1.0
        return x * jnp.asarray(scale, x.dtype), cache, auxiliary.within("decoder")

    @property
    def layers(self) -> Depth:
        """The decoder's, which have a cache."""
        return self.decoder.layers

    @property
    def output(self) -> Head:
        """The module that makes logits of `decode`'s result."""
        return Head(
            self.embedding.table if self.tied else self.head, None if self.vocab == self.dims["vocab"] else self.vocab
        )

    def flops_per_token(self, seq: int, frozen: Collection[str] = ()) -> int:
        """Model FLOPs of training on one token that the encoder reads, in a sequence of `seq`, forward and backward.
        Those of the decoder, which `SpanCorruption` gives a fifth as many tokens, are left out."""
        below = any(path.startswith(("embedding/", "encoder/bias")) and path not in frozen for path in parameters(self))
        return self.encoder.layers.training_flops(seq, paths_in("encoder/layers", frozen), below)[0]

    def flops_by_part(self, seq: int) -> dict[str, int]:
        """As of `axon.nn.LanguageModel`, of a token that the decoder writes; of the `encoder` of one that it reads."""
        head, encoder = weight_flops(self.output.matrix), self.encoder.layers.flops(seq)
        return {"layers": self.layers.flops(seq), "head": head, "mtp": 0, "encoder": encoder}


class _Stack(nnx.Module):
    """The encoder or the decoder: blocks that share a bias, and a norm."""

    def __init__(self, config: T5, kind: str, layers: int):
        self.kind, encodes = kind, kind == "encoder"
        self.bias = RelativeBias(config.dims, config.max_distance, both_sides=encodes)
        block = Block(config, SameDocument() if encodes else Causal() & SameDocument(), layers, crosses=not encodes)
        self.layers = Depth(Segment(layers, **{kind: block}))
        self.norm = config.norm()
        self.dropout, self.last_dropout = (Dropout(config.dropout, f"{kind} {place}") for place in ("first", "last"))

    def __call__(self, x: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        keys = x.shape[1] if cache is None else positions_of(cache[self.kind], inputs.start)
        inputs = replace(inputs, score_bias=self.bias(keys))
        x, new, auxiliary = self.layers(self.dropout(x, inputs), inputs, cache)
        if cache is not None:
            cache = {self.kind: cache[self.kind] | new[self.kind]}
        return self.last_dropout(self.norm(x, RESIDUAL), inputs), cache, auxiliary.within("layers")


class Block(nnx.Module):
    """Attention, in the decoder attention to the encoder's output too, and an MLP, each on the normalised residual
    stream and added to it. Scores are not divided by √head_dim: the initial values are.

    Of a cache comes back what changes: the keys and values of what the encoder read do not."""

    def __init__(self, config: T5, mask: Mask, layers: int, crosses: bool):
        dims, small, scale = config.dims, config.head_dim**-0.5, (2 * layers) ** -0.5
        self.attention_norm, self.mlp_norm = config.norm(), config.norm()
        self.attention = Attention(dims, mask, scale=1.0, biased=True, query_scale=small, out_scale=scale)
        if crosses:
            self.cross_norm = config.norm()
            self.cross = CrossAttention(dims, scale=1.0, query_scale=small, out_scale=scale)
        if config.gated:
            self.mlp = GatedMLP(dims, activation=gated(activation_of(config)), out_scale=scale)
        else:
            self.relu_mlp = MLP(dims, scale, activation=ACTIVATIONS[activation_of(config)], bias=False)
        places = ("attention", "cross", "mlp")
        self.dropouts = {name: Dropout(config.dropout, f"{mask} {name}") for name in places}
        self.crosses, self.gated = crosses, config.gated

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, pages = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = x + self.dropouts["attention"](out, inputs)
        if self.crosses:
            out = self.cross(self.cross_norm(x, RESIDUAL), inputs, cache)
            x = x + self.dropouts["cross"](out, inputs)
        mlp = self.mlp if self.gated else self.relu_mlp
        return x + self.dropouts["mlp"](mlp(self.mlp_norm(x, RESIDUAL)), inputs), pages, Auxiliary()

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        own = self.attention.cache_specs(batch, length)
        return own | self.cross.cache_specs(batch, length) if self.crosses else own


def _attention(theirs: str, ours: str, keys: str) -> tuple[Row, ...]:
    return (
        Row(f"{theirs}.q.weight", f"{ours}/query", "(heads head_dim) embed"),
        Row(f"{theirs}.k.weight", f"{ours}/key", f"({keys} head_dim) embed"),
        Row(f"{theirs}.v.weight", f"{ours}/value", f"({keys} head_dim) embed"),
        Row(f"{theirs}.o.weight", f"{ours}/out", "embed (heads head_dim)"),
    )


def _stack(stack: str, mlp: str, others: tuple[Row, ...] = ()) -> tuple[Row, ...]:
    """The rows of the encoder or of the decoder; `mlp`: their name of a block's last part."""
    block = (
        *_attention("layer.0.SelfAttention", "attention", "kv_heads"),
        Row("layer.0.layer_norm.weight", "attention_norm/scale"),
        Row(f"{mlp}.DenseReluDense.wi.weight", "relu_mlp/up", "mlp embed"),
        Row(f"{mlp}.DenseReluDense.wo.weight", "relu_mlp/down", "embed mlp"),
        Row(f"{mlp}.DenseReluDense.wi_0.weight", "mlp/gate", "mlp embed"),
        Row(f"{mlp}.DenseReluDense.wi_1.weight", "mlp/up", "mlp embed"),
        Row(f"{mlp}.DenseReluDense.wo.weight", "mlp/down", "embed mlp"),
        Row(f"{mlp}.layer_norm.weight", "mlp_norm/scale"),
    )
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        Row(bias, f"{stack}/bias/table", "buckets heads"),
        Row(f"{stack}.final_layer_norm.weight", f"{stack}/norm/scale"),
        *in_layers((*block, *others), f"{stack}.block.{{layer}}", f"{stack}/layers/*"),
    )


CROSS = (
    *_attention("layer.1.EncDecAttention", "cross", "heads"),
    Row("layer.1.layer_norm.weight", "cross_norm/scale"),
)
ROWS = (
    Row("shared.weight", "embedding/table"),
    Row("lm_head.weight", "head", "vocab embed"),
    *_stack("encoder", "layer.1"),
    *_stack("decoder", "layer.2", CROSS),
)


def _read_mlp(config: Mapping[str, Any]) -> dict[str, Any]:
    first, _, name = config.get("feed_forward_proj", "relu").rpartition("-")
    name = "gelu_new" if (first, name) == ("gated", "gelu") else name
    usual = "gelu_new" if first else "relu"
    for said, meant in (("dense_act_fn", name), ("is_gated_act", bool(first))):
        if config.get(said, meant) != meant:
            raise UserError(f"config.json: {said} is {shown(config[said])}, and feed_forward_proj says {shown(meant)}")
    return {"gated": bool(first), "activation": None if name == usual else name}


def _write_mlp(model: T5) -> dict[str, Any]:
    name = activation_of(model)
    if model.gated and name == "gelu":
        raise UserError("it has a gated gelu in its exact form, where gated-gelu stands for the tanh form")
    return {"feed_forward_proj": f"gated-{'gelu' if name == 'gelu_new' else name}" if model.gated else name}


def _read_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """The published models begin with their padding."""
    ids = (config.get(name) for name in ("decoder_start_token_id", "pad_token_id"))
    return {"start_id": next((one for one in ids if one is not None), 0)}


FIELDS = (
    Field("vocab_size", "vocab", SIZE, 32128),
    Field("d_model", "embed", SIZE, 512, also=("hidden_size",)),
    Field("d_kv", "head_dim", SIZE, 64, also=("head_dim",)),
    Field("d_ff", "mlp", SIZE, 2048),
    Field("num_layers", "encoder_layers", LAYERS, 6, also=("num_hidden_layers",)),
    Field("num_decoder_layers", "decoder_layers", LAYERS | NULL, SameAs("num_layers"), null=SameAs("num_layers")),
    Field("num_heads", "heads", SIZE, 8, also=("num_attention_heads",)),
    Field("relative_attention_num_buckets", "buckets", SIZE, 32),
    Field("relative_attention_max_distance", "max_distance", SIZE, 128),
    Field("dropout_rate", "dropout", RATE, 0.1),
    Field("layer_norm_epsilon", "norm_eps", EPS, 1e-6),
    Converted(
        _read_mlp,
        _write_mlp,
        {
            "feed_forward_proj": one_of(*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)),
            "dense_act_fn": one_of(*ACTIVATIONS),
            "is_gated_act": FLAG,
        },
        unset={"activation": activation_of},
    ),
    # transformers 5 ties the heads of all that have none of their own, and says `tie_word_embeddings` of all.
    Field("scale_decoder_outputs", "scaled", FLAG, SameAs("tie_word_embeddings"), unset=is_scaled),
    Field("tie_word_embeddings", "tied", FLAG, True),
    Converted(
        _read_start,
        lambda model: {"decoder_start_token_id": model.start_id},
        {"decoder_start_token_id": COUNT | NULL, "pad_token_id": TOKEN_ID},
    ),
    *ignored("n_positions", "output_past"),
)
HUGGING_FACE = (
    Architecture(
        "T5ForConditionalGeneration",
        "t5",
        T5,
        ROWS,
        FIELDS,
        copies=(
            Copy("lm_head.weight", "shared.weight", {"tied": False}, absent={"tied": True}),
            Copy("encoder.embed_tokens.weight", "shared.weight"),
            Copy("decoder.embed_tokens.weight", "shared.weight"),
        ),
        unused=(),
    ),
)
