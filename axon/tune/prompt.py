"""`Prompt`, what a model answers. It and what else an environment's own process imports need no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        where: it is from, for messages. text, ids: its text and its tokens. reference: the text of the right answer,
            empty where there is none. record: its columns in the source.
    """

    where: str
    text: str
    ids: tuple[int, ...]
    reference: str = ""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
