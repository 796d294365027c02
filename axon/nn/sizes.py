"""Sizes in a model's config."""

from typing import Any

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple."""
    return -(-size // multiple) * multiple


def head_dim(config: Any) -> int:
    """The head_dim of a model's config: embed / heads where it is None."""
    return config.head_dim or config.embed // config.heads


def decoder_dims(config: Any) -> dict[str, int]:
    """Sizes of the named axes of a decoder with gated MLPs, from a model's config: its vocabulary padded."""
    sizes = field_values(config, ("embed", "heads", "kv_heads", "mlp"))
    return sizes | {"head_dim": head_dim(config), "vocab": padded(config.vocab, config.vocab_multiple)}


def check_decoder(config: Any, *others: str) -> None:
    """Raise `UserError` for sizes of a decoder, or `others`, that are out of range; see `check_heads`."""
    sizes = ("vocab", "vocab_multiple", "embed", "layers", "heads", "kv_heads", "mlp", "head_dim")
    check_sizes(config, *sizes, *others)
    check_heads(config)


def check_sizes(config: Any, *sizes: str) -> None:
    """Raise `UserError` for `sizes`, `layers` or the `norm_eps` of a model's config that are out of range."""
    check_range(config, "[1, 2**31)", *sizes)
    check_range(config, "[1, 2**16]", "layers")
    check_range(config, "[0, inf)", "norm_eps")


def check_heads(config: Any) -> None:
    """Raise `UserError` unless the heads, KV heads and head_dim of a config fit each other and rotary embedding.

    Each is at least 1; `head_dim` may be None, for embed / heads.
    """
    name, heads, kv_heads = type(config).__name__, config.heads, config.kv_heads
    if config.head_dim is None and config.embed % heads:
        raise UserError(f"{name}: embed {config.embed} is not divisible by heads {heads}; set head_dim")
    if head_dim(config) % 2:
        raise UserError(f"{name}: head_dim {head_dim(config)} is odd, and rotary embedding rotates pairs")
    if heads % kv_heads:
        raise UserError(f"{name}: heads {heads} is not a multiple of kv_heads {kv_heads}")
