"""DeepSeek-V2 and V3: latent attention, and a second token predicted.

Layers with experts are to come, so `first_dense` is all layers, and published weights do not load yet.
"""

from dataclasses import dataclass

from flax import nnx

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.attention import Causal, SameDocument
from axon.nn import (
    Auxiliary,
    Depth,
    GatedMLP,
    LanguageModel,
    LatentAttention,
    MultiTokenBlock,
    RMSNorm,
    Rope,
    Segment,
    YarnScaling,
)
from axon.nn.language_model import RESIDUAL
from axon.nn.remat import RematByKind, remat_by_kind
from axon.nn.sizes import padded

__all__ = ["DeepSeek"]


@dataclass(frozen=True)
class DeepSeek:
    """DeepSeek-V2 (arXiv:2405.04434) and DeepSeek-V3 (2412.19437), whose sizes are the defaults.

    Args:
        vocab, embed, layers, heads: sizes. first_dense: layers that have a gated MLP, of width mlp; for now all.
        q_latent, kv_latent: what a token's queries, and its keys and values, are made from; q_latent None: the stream.
        nope_dim, rope_dim: widths of a head's queries and keys, of what is not rotated and of what is; value_dim: of
            its values.
        rope: rotary frequencies; interleaved: whether neighbours are a pair, see `axon.nn.rope.rotate`. norm_eps: of
            RMSNorm.
        multi_token: a block after the last that predicts the token after the next, for the objective `MultiToken`.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.
        remat: what the backward recomputes or offloads, see `axon.nn.remat`. unroll: see `axon.nn.Depth`.
    """

    vocab: int = 129_280
    embed: int = 7168
    layers: int = 61
    first_dense: int = 3
    heads: int = 128
    mlp: int = 18_432
    q_latent: int | None = 1536
    kv_latent: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    rope: Rope = Rope(10_000.0, YarnScaling(40.0, original=4096, mscale_all_dim=1.0))
    interleaved: bool = True
    norm_eps: float = 1e-6
    multi_token: bool = False
    vocab_multiple: int = 1
    remat: RematByKind = "none"
    unroll: bool | None = None

    def __post_init__(self):
        sizes = ("vocab", "vocab_multiple", "embed", "layers", "first_dense", "heads", "mlp", "q_latent", "kv_latent")
        check_range(self, "[1, 2**31)", *sizes, "nope_dim", "rope_dim", "value_dim")
        check_range(self, "[0, inf)", "norm_eps")
        if self.rope_dim % 2:
            raise UserError(f"DeepSeek: rope_dim {self.rope_dim} is odd, and rotary embedding rotates pairs")
        if self.first_dense != self.layers:
            raise UserError(
                f"DeepSeek: first_dense {self.first_dense} is not layers {self.layers}, and layers with experts cannot "
                "be built yet. Set both to the same number"
            )
        remat_by_kind(self.remat, dict.fromkeys(("dense",), LatentAttention.remat_names + GatedMLP.remat_names))

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        names = ("embed", "heads", "mlp", "kv_latent", "nope_dim", "rope_dim", "value_dim")
        latent = {} if self.q_latent is None else {"q_latent": self.q_latent}
        return {n: getattr(self, n) for n in names} | latent | {"vocab": padded(self.vocab, self.vocab_multiple)}

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        depth = Depth(Segment(self.first_dense, dense=Block(self)), remat=self.remat, unroll=self.unroll)
        remat = depth.remat["dense"]
        return LanguageModel(
            self.dims,
            depth,
            RMSNorm("embed", self.dims, self.norm_eps),
            tied=False,
            embedding_stddev=self.embed**-0.5,
            vocab=self.vocab,
            ahead=MultiTokenBlock(self.dims, Block(self), norm_eps=self.norm_eps, remat=remat)
            if self.multi_token
            else None,
        )


class Block(nnx.Module):
    """Latent attention and a gated MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: DeepSeek):
        dims, scale = config.dims, (2 * config.layers) ** -0.5
        self.attention_norm = RMSNorm("embed", dims, config.norm_eps)
        self.attention = LatentAttention(
            dims,
            Causal() & SameDocument(),
            rope=config.rope,
            interleaved=config.interleaved,
            norm_eps=config.norm_eps,
            out_scale=scale,
        )
        self.mlp_norm = RMSNorm("embed", dims, config.norm_eps)
        self.mlp = GatedMLP(dims, out_scale=scale)

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x, RESIDUAL)), cache, Auxiliary()

    def cache_specs(self, batch, length):
        return self.attention.cache_specs(batch, length)
