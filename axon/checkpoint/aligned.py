"""Memory that JAX takes on CPUs as it is: of other arrays it makes a copy, in fresh memory that the kernel clears."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 64
"""Bytes of which the address is a multiple."""


def aligned_zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """`np.zeros`, in memory that begins as JAX likes it."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
