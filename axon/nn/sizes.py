"""Sizes in a model's config."""

from typing import Any

from axon.checks import check_range


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple."""
    return -(-size // multiple) * multiple


def head_dim(config: Any) -> int:
    """The head_dim of a model's config: embed / heads where it is None."""
    return config.head_dim or config.embed // config.heads


def check_sizes(config: Any, *sizes: str) -> None:
    """Raise `UserError` for `sizes`, `layers` or the `norm_eps` of a model's config that are out of range."""
    check_range(config, "[1, 2**31)", *sizes)
    check_range(config, "[1, 2**16]", "layers")
    check_range(config, "[0, inf)", "norm_eps")
