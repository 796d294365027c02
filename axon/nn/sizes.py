"""Sizes in a model's config."""

from collections.abc import Iterable
from typing import Any

from axon.errors import UserError


def check_sizes(config: Any, names: Iterable[str]) -> None:
    """Raise `UserError` for a size below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise UserError(f"{type(config).__name__}.{name} is {getattr(config, name)}; write 1 or more")


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple."""
    return -(-size // multiple) * multiple
