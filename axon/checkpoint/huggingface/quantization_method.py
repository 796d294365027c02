"""The interface of a library's way to store weights in few bits."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from axon.foreign_json import Kind

WHERE = "config.json: quantization_config"

NOTHING: Mapping[str, tuple[Kind, Any]] = MappingProxyType({})


class Parts(Protocol):
    """The arrays that one weight is stored as, by what their names end with."""

    def __contains__(self, part: object) -> bool: ...
    def shape(self, part: str) -> tuple[int, ...]: ...
    def read(self, part: str) -> np.ndarray: ...


class Method(Protocol):
    """How a library stores weights in few bits.

    `endings`: what the names of the parts of each end with, the first that of one which nothing else has. `name`: what
    the weight's own name ends with in their place. `by_rows`: whether a part reads the rows of its first dimension
    that are asked for alone, where a weight is large. `fields`: those of its `quantization_config` that say how, what
    each can be, and its default.
    """

    endings: tuple[str, ...]
    name: str = ""
    by_rows: bool = False
    fields: Mapping[str, tuple[Kind, Any]] = NOTHING

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]: ...
    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray: ...


def packed_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of so many bits that each integer of a row holds, the lowest first, one after the other."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (packed.astype(np.int32).view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(packed), -1).astype(np.int32)
