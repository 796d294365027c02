"""What the configs of decoder-only families share: their sizes, and a module of a depth between embedding and head."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

from axon.errors import UserError
from axon.fields import field_values
from axon.nn.depth import Depth, Segment
from axon.nn.language_model import LanguageModel
from axon.nn.multi_token import MultiTokenBlock
from axon.nn.norm import RMSNorm
from axon.nn.sizes import check_sizes, head_dim, padded


@dataclass(frozen=True)
class DecoderConfig:
    """The base of configs of decoders with rotary embedding and RMSNorm, which implement `segments`, and `mtp`
    where they have one.

    Args:
        vocab, embed, layers, heads, kv_heads, mlp: sizes; head_dim: embed / heads by default. norm_eps: of RMSNorm.
        tied: one matrix for embedding and head.
        vocab_multiple: embedding and head are padded to a multiple of it, with ids that are never predicted.

    Raises `UserError` for sizes that are out of range, or heads that do not fit each other and rotary embedding.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    _: KW_ONLY
    head_dim: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    vocab_multiple: int = 1

    def __post_init__(self):
        check_sizes(self, "vocab", "vocab_multiple", "embed", "layers", "heads", "kv_heads", "mlp", "head_dim")
        name = type(self).__name__
        if self.head_dim is None and self.embed % self.heads:
            raise UserError(f"{name}: embed {self.embed} is not divisible by heads {self.heads}; set head_dim")
        if head_dim(self) % 2:
            raise UserError(f"{name}: head_dim {head_dim(self)} is odd, and rotary embedding rotates pairs")
        if self.heads % self.kv_heads:
            raise UserError(f"{name}: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes: the vocabulary's is padded."""
        sizes = field_values(self, ("embed", "heads", "kv_heads", "mlp"))
        return sizes | {"head_dim": head_dim(self), "vocab": padded(self.vocab, self.vocab_multiple)}

    @property
    def norm(self) -> partial[RMSNorm]:
        """RMSNorm with all arguments but its axes."""
        return partial(RMSNorm, dims=self.dims, eps=self.norm_eps)

    def segments(self) -> list[Segment]:
        """The blocks, in segments of the depth."""
        raise NotImplementedError

    def mtp(self) -> MultiTokenBlock | None:
        """The block that predicts the token after the next, if there is one."""
        return None

    def build(self) -> LanguageModel:
        """The module, its parameters not yet initialised."""
        depth, norm = Depth(*self.segments()), self.norm("embed")
        return LanguageModel(self.dims, depth, norm, tied=self.tied, vocab=self.vocab, mtp=self.mtp())
