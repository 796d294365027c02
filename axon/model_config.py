"""Declarations of a model's configuration: of text, or of images."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class TextConfig(Protocol):
    """A model of text; `vocab`: how many ids it has."""

    vocab: int


@runtime_checkable
class PaddedConfig(TextConfig, Protocol):
    """One whose embedding and head may be padded to a multiple of ids."""

    vocab_multiple: int


@runtime_checkable
class PoolerConfig(TextConfig, Protocol):
    """One that may have a layer over a text's first token, which other parts of it do without."""

    pooler: bool


@runtime_checkable
class MultiTokenConfig(TextConfig, Protocol):
    """One that may have a block that predicts the token after the next."""

    multi_token: bool


@runtime_checkable
class TypedConfig(TextConfig, Protocol):
    """One that embeds the types of tokens, so many, as of the first and the second text of a pair."""

    types: int


@runtime_checkable
class ImageConfig(Protocol):
    """A model of images: of height and width `image`, each `seq` positions, in one of `classes`."""

    seq: int
    image: int
    channels: int
    classes: int


def vocab_of(model: object) -> int | None:
    """How many ids a model of text has; None for one of images."""
    return model.vocab if isinstance(model, TextConfig) else None
