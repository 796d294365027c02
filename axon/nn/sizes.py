"""Sizes in a model's config."""


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple."""
    return -(-size // multiple) * multiple
