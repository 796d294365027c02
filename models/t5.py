"""T5: an encoder–decoder with a relative position bias."""

from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.attention import Causal, Mask, SameDocument
from axon.nn import (
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
    geglu,
)
from axon.nn.language_model import RESIDUAL
from axon.nn.remat import Remat, RematByKind, remat_by_kind
from axon.nn.sizes import padded

__all__ = ["T5"]


@dataclass(frozen=True)
class T5:
    """Raffel et al. (arXiv:1910.10683); gated and untied it is T5 1.1. Train it by `SpanCorruption`.

    Args:
        vocab, embed, heads, head_dim, mlp: sizes; encoder_layers, decoder_layers: depth.
        buckets, max_distance: of the relative position bias, see `axon.nn.RelativeBias`.
        gated: gelu(gate)·up (T5 1.1) rather than relu(up). tied: one matrix for embedding and head, which sees the
            decoder's output divided by √embed. norm_eps: of RMSNorm.
        dropout: fraction of activations dropped after the embeddings and after each part of a block, in training.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        remat: what the backward recomputes or offloads, see `axon.nn.remat`, of the kinds of block `encoder` and
            `decoder`. unroll: see `axon.nn.Depth`.
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
    tied: bool = False
    norm_eps: float = 1e-6
    dropout: float = 0.1
    vocab_multiple: int = 1
    remat: RematByKind = "none"
    unroll: bool | None = None

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "encoder_layers", "decoder_layers", "heads", "head_dim", "mlp")
        check_range(self, "[1, 2**31)", *sizes)
        check_range(self, "[4, 2**31)", "buckets")
        check_range(self, "[0, inf)", "norm_eps")
        check_range(self, "[0, 1)", "dropout")
        if self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise UserError(
                f"T5: buckets {self.buckets} must be even, and max_distance {self.max_distance} above half of that"
            )
        self.remat_of("encoder")

    def remat_of(self, kind: str) -> Remat:
        """The policy of `encoder` or `decoder`. Raises `UserError` for an unknown one."""
        names = Attention.remat_names + (GatedMLP if self.gated else MLP).remat_names
        return remat_by_kind(self.remat, dict.fromkeys(("encoder", "decoder"), names))[kind]

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        sizes = {name: getattr(self, name) for name in ("embed", "heads", "head_dim", "mlp", "buckets")}
        return sizes | {"kv_heads": self.heads, "vocab": padded(self.vocab, self.vocab_multiple)}

    @property
    def norm(self) -> partial[RMSNorm]:
        """RMSNorm with all arguments."""
        return partial(RMSNorm, "embed", self.dims, self.norm_eps)

    def build(self) -> "T5Model":
        """The module, its parameters not yet initialised."""
        return T5Model(self)


class T5Model(nnx.Module):
    """Token ids in, and those that a decoder has written so far; a distribution over its next id out."""

    def __init__(self, config: T5):
        dims = config.dims
        self.embedding = Embedding("vocab", dims, 1.0)
        self.encoder = _Stack(config, "encoder", config.encoder_layers)
        self.decoder = _Stack(config, "decoder", config.decoder_layers)
        if not config.tied:
            self.head = Param("embed vocab", dims)
        self.tied, self.dims, self.vocab = config.tied, dims, config.vocab

    def encode(self, inputs: Inputs) -> tuple[Array, Auxiliary]:
        """`batch seq.residual embed`, and the layers' auxiliary terms."""
        x, auxiliary = self.encoder(self.embedding(inputs.tokens), inputs)
        return x, auxiliary.within("encoder")

    def decode(self, inputs: Inputs, encoded: Array, documents: Array | None) -> tuple[Array, Auxiliary]:
        """What `output` predicts the next ids from, `batch seq.residual embed`, and the layers' auxiliary terms.

        `encoded`: by `encode`, of sequences of any length; `documents`: which document each of its positions is of.
        """
        inputs = replace(inputs, encoded=encoded, encoded_documents=documents)
        x, auxiliary = self.decoder(self.embedding(inputs.tokens), inputs)
        scale = self.dims["embed"] ** -0.5 if self.tied else 1.0
        return x * jnp.asarray(scale, x.dtype), auxiliary.within("decoder")

    @property
    def output(self) -> Head:
        """What makes logits of `decode`'s result."""
        return Head(
            self.embedding.table if self.tied else self.head, None if self.vocab == self.dims["vocab"] else self.vocab
        )

    def flops_per_token(self, seq: int) -> int:
        """Model FLOPs of training on one token that the encoder reads, in a sequence of `seq`, forward and backward.
        Those of the decoder, which `SpanCorruption` gives a fifth as many tokens, are left out."""
        return 3 * self.encoder.layers.flops(seq)


class _Stack(nnx.Module):
    """The encoder or the decoder: blocks that share a bias, and a norm."""

    def __init__(self, config: T5, kind: str, layers: int):
        encodes = kind == "encoder"
        self.bias = RelativeBias(config.dims, config.max_distance, both_sides=encodes)
        block = Block(config, SameDocument() if encodes else Causal() & SameDocument(), layers, crosses=not encodes)
        self.layers = Depth(Segment(layers, **{kind: block}), remat={kind: config.remat_of(kind)}, unroll=config.unroll)
        self.norm = config.norm()
        self.dropout, self.last_dropout = (Dropout(config.dropout, f"{kind} {place}") for place in ("first", "last"))

    def __call__(self, x: Array, inputs: Inputs) -> tuple[Array, Auxiliary]:
        inputs = replace(inputs, score_bias=self.bias(x.shape[1]))
        x, _, auxiliary = self.layers(self.dropout(x, inputs), inputs)
        return self.last_dropout(self.norm(x, RESIDUAL), inputs), auxiliary.within("layers")


class Block(nnx.Module):
    """Attention, in the decoder attention to the encoder's output too, and an MLP, each on the normalised residual
    stream and added to it. Scores are not divided by √head_dim: the initial values are."""

    def __init__(self, config: T5, mask: Mask, layers: int, crosses: bool):
        dims, small, scale = config.dims, config.head_dim**-0.5, (2 * layers) ** -0.5
        self.attention_norm, self.mlp_norm = config.norm(), config.norm()
        self.attention = Attention(dims, mask, scale=1.0, biased=True, query_scale=small, out_scale=scale)
        if crosses:
            self.cross_norm = config.norm()
            self.cross = CrossAttention(dims, scale=1.0, query_scale=small, out_scale=scale)
        if config.gated:
            self.mlp = GatedMLP(dims, activation=geglu, out_scale=scale)
        else:
            self.mlp = MLP(dims, scale, activation=nnx.relu, bias=False)
        places = ("attention", "cross", "mlp")
        self.dropouts = {name: Dropout(config.dropout, f"{mask} {name}") for name in places}
        self.crosses = crosses

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, _ = self.attention(self.attention_norm(x, RESIDUAL), inputs)
        x = x + self.dropouts["attention"](out, inputs)
        if self.crosses:
            x = x + self.dropouts["cross"](self.cross(self.cross_norm(x, RESIDUAL), inputs), inputs)
        return x + self.dropouts["mlp"](self.mlp(self.mlp_norm(x, RESIDUAL)), inputs), cache, Auxiliary()
