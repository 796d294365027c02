"""In which order the devices of a ring store a sequence."""

import numpy as np


def zigzag(size: int, seq: int) -> np.ndarray:
    """The positions of a sequence as `size` devices store it, one device after the other.

    Of 2·size chunks device i has i and 2·size − 1 − i: under a causal mask, an equal share of the pairs.
    """
    chunks = np.arange(seq).reshape(2 * size, -1)
    return np.concatenate([chunks[[i, 2 * size - 1 - i]].reshape(-1) for i in range(size)])
