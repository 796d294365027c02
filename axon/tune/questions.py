"""Which split an example is in: that of its question, in whatever writing."""

import unicodedata

import numpy as np

from axon.data.prepare import share_of
from axon.data.tokenizer import Tokenizer


class Questions:
    """Questions, by their ids, a share `held_out` of them in the split of that name.

    The hash of the normalised text decides, so that one question in several writings is in one split.
    """

    def __init__(self, tokenizer: Tokenizer, held_out: float):
        self._tokenizer, self._held_out = tokenizer, held_out
        self._first: dict[str, bytes] = {}

    def __call__(self, ids: np.ndarray) -> tuple[str, bool]:
        """A question's split, and whether it was there already in another writing."""
        text = normalised(self._tokenizer.decode(ids.tolist()))
        raw = text.encode("utf-8", "surrogatepass")
        rewritten = self._first.setdefault(text, ids.tobytes()) != ids.tobytes()
        return "held_out" if share_of(raw) < self._held_out else "train", rewritten


def normalised(text: str) -> str:
    """`text` but for case, for what is white space and how much of it, and for compatible forms of Unicode (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
