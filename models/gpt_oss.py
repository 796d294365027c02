"""gpt-oss: attention sinks, sliding-window layers between full ones, and experts with biases."""

from dataclasses import dataclass

from flax import nnx

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.nn import (
    Attention,
    ClampedSwiGLU,
    Depth,
    LanguageModel,
    MoE,
    RMSNorm,
    Rope,
    Routing,
    Segment,
    YarnScaling,
)
from axon.nn.language_model import RESIDUAL
from axon.nn.moe import check_exchange
from axon.nn.remat import RematByKind, remat_by_kind
from axon.nn.sizes import check_heads, decoder_dims

__all__ = ["GptOss"]


@dataclass(frozen=True)
class GptOss:
    """OpenAI, gpt-oss-120b & gpt-oss-20b Model Card (arXiv:2508.10925); the 20b's sizes are the defaults.

    Args:
        vocab, embed, layers, heads, kv_heads, head_dim: sizes; mlp: an expert's width.
        routing: how experts are chosen, and how many there are. activation: of their gates and ups. exchange, margin:
            how tokens get to their experts, see `axon.nn.MoE`.
        window: keys that a query of every other layer, the first one's, sees. rope: rotary frequencies.
        norm_eps: of RMSNorm.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        remat: what the backward recomputes or offloads, see `axon.nn.remat`. unroll: see `axon.nn.Depth`.
    """

    vocab: int = 201_088
    embed: int = 2880
    layers: int = 24
    heads: int = 64
    kv_heads: int = 8
    mlp: int = 2880
    head_dim: int = 64
    routing: Routing = Routing(32, 4)
    activation: ClampedSwiGLU = ClampedSwiGLU()
    exchange: str = "auto"
    margin: float = 1.5
    window: int = 128
    rope: Rope = Rope(150_000.0, YarnScaling(32.0, original=4096, truncate=False))
    norm_eps: float = 1e-5
    vocab_multiple: int = 1
    remat: RematByKind = "none"
    unroll: bool | None = None

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "layers", "heads", "kv_heads", "mlp", "head_dim", "window")
        check_range(self, "[1, 2**31)", *sizes)
        check_range(self, "[0, inf)", "norm_eps")
        check_exchange(self.exchange, self.margin)
        check_heads(self)
        if self.layers % 2:
            raise UserError(f"GptOss: layers {self.layers} is odd, and they come in pairs of a local and a full one")
        remat_by_kind(self.remat, dict.fromkeys(("local", "full"), Attention.remat_names + MoE.remat_names))

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        return decoder_dims(self) | {"experts": self.routing.experts}

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        seen = Causal() & SameDocument()
        pair = {"local": Block(self, seen & Window(self.window)), "full": Block(self, seen)}
        return LanguageModel(
            self.dims,
            Depth(Segment(self.layers // 2, **pair), remat=self.remat, unroll=self.unroll),
            RMSNorm("embed", self.dims, self.norm_eps),
            tied=False,
            embedding_stddev=self.embed**-0.5,
            vocab=self.vocab,
        )


class Block(nnx.Module):
    """Attention with sinks and a mixture of experts, each on the normalised residual stream and added to it."""

    def __init__(self, config: GptOss, mask: Mask):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm = RMSNorm("embed", dims, config.norm_eps)
        self.attention = Attention(dims, mask, rope=config.rope, sinks=True, bias=True, out_bias=True, out_scale=scale)
        self.moe_norm = RMSNorm("embed", dims, config.norm_eps)
        self.moe = MoE(
            dims,
            config.routing,
            exchange=config.exchange,
            margin=config.margin,
            activation=config.activation,
            bias=True,
            out_scale=scale,
        )

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = x + out
        out, auxiliary = self.moe(self.moe_norm(x, RESIDUAL), inputs)
        return x + out, cache, auxiliary.within("moe")

    def cache_specs(self, batch, length):
        return self.attention.cache_specs(batch, length)
