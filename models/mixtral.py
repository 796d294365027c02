"""Mixtral, and the models that differ from it by a field: Qwen3-MoE."""

from dataclasses import dataclass

from flax import nnx

from axon.checks import check_range
from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import Attention, Depth, LanguageModel, MoE, RMSNorm, Rope, Routing, Segment
from axon.nn.language_model import RESIDUAL
from axon.nn.moe import check_exchange
from axon.nn.remat import RematByKind, remat_by_kind
from axon.nn.sizes import check_heads, decoder_dims

__all__ = ["Mixtral"]


@dataclass(frozen=True)
class Mixtral:
    """Jiang et al. (arXiv:2401.04088); Qwen3-MoE's QK norm (2505.09388).

    Args:
        vocab, embed, layers, heads, kv_heads: sizes; mlp: an expert's width; head_dim: embed / heads by default.
        routing: how experts are chosen, and how many there are. shared: width of an MLP that every token goes through.
        exchange, margin: how tokens get to their experts, see `axon.nn.MoE`.
        rope: rotary frequencies. window: keys a query sees, None for all. norm_eps: of RMSNorm.
        qk_norm: RMSNorm of each head's queries and keys. tied: one matrix for embedding and head.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        remat: what the backward recomputes or offloads, see `axon.nn.remat`. unroll: see `axon.nn.Depth`.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    routing: Routing
    shared: int = 0
    exchange: str = "auto"
    margin: float = 1.5
    head_dim: int | None = None
    rope: Rope = Rope()
    window: int | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    vocab_multiple: int = 1
    remat: RematByKind = "none"
    unroll: bool | None = None

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "layers", "heads", "kv_heads", "mlp", "head_dim", "window")
        check_range(self, "[1, 2**31)", *sizes)
        check_range(self, "[0, 2**31)", "shared")
        check_range(self, "[0, inf)", "norm_eps")
        check_exchange(self.exchange, self.margin)
        check_heads(self)
        remat_by_kind(self.remat, dict.fromkeys(("block",), Attention.remat_names + MoE.remat_names))

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        return decoder_dims(self) | {"experts": self.routing.experts}

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        return LanguageModel(
            self.dims,
            Depth(Segment(self.layers, block=Block(self)), remat=self.remat, unroll=self.unroll),
            RMSNorm("embed", self.dims, self.norm_eps),
            tied=self.tied,
            embedding_stddev=self.embed**-0.5,
            vocab=self.vocab,
        )


class Block(nnx.Module):
    """Attention and a mixture of experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: Mixtral):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        mask = Causal() & SameDocument()
        if config.window is not None:
            mask = mask & Window(config.window)
        qk_norm = (lambda heads: RMSNorm("head_dim", dims, config.norm_eps)) if config.qk_norm else None
        self.attention_norm = RMSNorm("embed", dims, config.norm_eps)
        self.attention = Attention(dims, mask, rope=config.rope, qk_norm=qk_norm, out_scale=scale)
        self.moe_norm = RMSNorm("embed", dims, config.norm_eps)
        self.moe = MoE(
            dims,
            config.routing,
            shared=config.shared,
            exchange=config.exchange,
            margin=config.margin,
            out_scale=scale,
        )

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = x + out
        out, auxiliary = self.moe(self.moe_norm(x, RESIDUAL), inputs)
        return x + out, cache, auxiliary.within("moe")

    def cache_specs(self, batch, length):
        return self.attention.cache_specs(batch, length)
