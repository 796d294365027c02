"""Which documents the sequences of a batch are of, by counting where documents begin."""

from typing import Any

import numpy as np

from axon.data.batches import TokenSequences
from axon.data.tokens import Tokens

WINDOW = 2**18
"""Tokens read at once."""


def documents_of(sequences: TokenSequences, numbers: np.ndarray, bos: int) -> list[tuple[int, dict[str, Any]]]:
    """Of each sequence, in ascending order: its source, and `sequence`, `first` and `last` document, from 0."""
    found = []
    sources = sequences.source_of(numbers)
    for source in np.unique(sources).tolist():
        own = np.unique(numbers[sources == source]) - sequences.span(source)[0]
        starts = own * sequences.seq
        begun = _begun_before(sequences.tokens_of(source), np.ravel([starts + 1, starts + sequences.seq], "F"), bos)
        for sequence, first, last in zip(own.tolist(), begun[::2], begun[1::2], strict=True):
            found.append((source, {"sequence": sequence, "first": first - 1, "last": last - 1}))
    return found


def _begun_before(tokens: Tokens, ends: np.ndarray, bos: int) -> list[int]:
    """How many documents begin among the tokens before each of `ends`, which ascend."""
    counts, position, begun = [], 0, 0
    for end in ends.tolist():
        while position < end:
            length = min(WINDOW, end - position)
            begun += int(np.count_nonzero(tokens.read(np.array([position]), length) == bos))
            position += length
        counts.append(begun)
    return counts
