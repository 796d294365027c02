"""How the TPU kernels cut queries and keys into tiles, and which tiles of keys a tile of queries sees."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.chips import chip_of
from axon.kernels.attention.mask import Mask
from axon.kernels.attention.problem import AttentionInputs

LANES = 128


@dataclass(frozen=True)
class Tiles:
    """Rows of queries (those of all heads of a group together) and keys of a tile at most, forward and backward.

    Args:
        dq_vmem: bytes of VMEM for the gradient of the queries, accumulated in float32 for a whole span.
        vmem: bytes of VMEM that a kernel may take.
        overhead: what it costs the forward to meet some keys, besides their pairs: as much as so many pairs.
        cores: of a device, which share the heads of a batch, or the spans of their queries.
        rectangle: pairs of a query and a key that one more rectangle costs, where a tile is computed as several.
    """

    rows: int = 1024
    keys: int = 1024
    backward_rows: int = 1024
    backward_keys: int = 512
    dq_vmem: int = 32 * 2**20
    vmem: int = 56 * 2**20
    overhead: int = 2**15
    cores: int = 1
    rectangle: int = 2**15

    def group_parts(self, group: int) -> int:
        """Into how many equal groups one is split, so that 128 queries of each head of one are rows of a tile."""
        most = max(1, min(self.rows, self.backward_rows) // LANES)
        return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)

    def halved(self) -> "Tiles":
        """For float32 operands, whose exact products are six of bfloat16 each: long programs, and twice the bytes."""
        rows, keys = max(self.rows // 2, LANES), max(self.keys // 2, LANES)
        return replace(
            self, rows=rows, keys=keys, backward_rows=rows, backward_keys=max(self.backward_keys // 2, LANES)
        )


@dataclass(frozen=True)
class Grid:
    """One attention cut into tiles: `queries` positions of each of `group` heads against `keys` keys.

    `real_queries` and `real_keys` are there; what fills the last tiles is padding, which no query sees.
    """

    group: int
    queries: int
    keys: int
    real_queries: int
    real_keys: int

    @classmethod
    def of(cls, rows: int, keys: int, group: int, real_queries: int, real_keys: int) -> "Grid":
        """Tiles of at most so many rows and keys, evenly cut, in multiples of the 128 lanes."""
        queries = _even(real_queries, max(rows // group, 1))
        return cls(group, queries, _even(real_keys, keys), real_queries, real_keys)

    @property
    def rows(self) -> int:
        return self.group * self.queries

    @property
    def query_tiles(self) -> int:
        return -(-self.real_queries // self.queries)

    @property
    def key_tiles(self) -> int:
        return -(-self.real_keys // self.keys)

    @property
    def padded_keys(self) -> int:
        return self.key_tiles * self.keys

    def steps(self, mask: Mask, start: Any) -> int:
        """Tiles of keys that a tile of queries reaches at most."""
        if isinstance(start, int):
            low, high = self.key_range(mask, start, np)
            return max(1, int(np.max(high - low)))
        low, high = mask.low(np.arange(self.real_keys)), mask.high(np.arange(self.real_keys))
        if low is None or high is None:
            return self.key_tiles
        span = self.queries - 1 + int(np.max(high - low))
        return max(1, min(self.key_tiles, (span + self.keys - 2) // self.keys + 1))

    def key_range(self, mask: Mask, start: Any, numpy: Any) -> tuple[Any, Any]:
        """For each tile of queries the half-open range of tiles of keys that the mask's indices allow."""
        first = start + numpy.arange(self.query_tiles) * self.queries
        low, high = mask.keys(first, first + self.queries, self.real_keys)
        low, high = (numpy.broadcast_to(end, first.shape) for end in (low, high))
        return low // self.keys, numpy.where(high > low, -(-high // self.keys), low // self.keys)


def _even(size: int, most: int) -> int:
    """The size of a tile, a multiple of the lanes, of as few even tiles as hold `size` in tiles of at most `most`."""
    most = max(LANES, most // LANES * LANES)
    count = -(-size // most)
    return -(-size // count // LANES) * LANES


class Reach(NamedTuple):
    """What a kernel looks up, tile by tile, in scalar memory; every table one row of a batch after the other.

    Attributes:
        first, last: of each tile of queries, the first tile of keys that it sees and the last; last < first for none.
        first_query, last_query: of each tile of keys, the tiles of queries that see it.
        query_document, key_document: of each tile, the least document and the greatest; None without documents.
        start: index of the first query among the keys, `[1]`.
    """

    first: Array
    last: Array
    first_query: Array
    last_query: Array
    query_document: tuple[Array, Array] | None
    key_document: tuple[Array, Array] | None
    start: Array


def reach(grid: Grid, mask: Mask, inputs: AttentionInputs) -> Reach:
    """The tables of an attention. Without documents they have one row, which stands for all."""
    low, high = grid.key_range(mask, jnp.asarray(inputs.start, jnp.int32), jnp)
    seen = (low[:, None] <= np.arange(grid.key_tiles)) & (np.arange(grid.key_tiles) < high[:, None])
    seen, documents = seen[None], (None, None)
    if mask.by_document and inputs.documents is not None:
        least, most = _range(inputs.documents[0], grid.queries, grid.query_tiles)
        key_least, key_most = _range(inputs.documents[1], grid.keys, grid.key_tiles)
        seen = seen & (least[:, :, None] <= key_most[:, None]) & (key_least[:, None] <= most[:, :, None])
        documents = (least.reshape(-1), most.reshape(-1)), (key_least.reshape(-1), key_most.reshape(-1))
    start = jnp.asarray(inputs.start, jnp.int32).reshape(1)
    (first, last), (first_query, last_query) = _ends(seen, 2), _ends(seen, 1)
    return Reach(first, last, first_query, last_query, *documents, start)


def _range(documents: Array, size: int, count: int) -> tuple[Array, Array]:
    """The least and the greatest document of each tile, `batch tiles`."""
    missing = size * count - documents.shape[1]
    cut = jnp.pad(documents, ((0, 0), (0, missing)), mode="edge").reshape(documents.shape[0], count, size)
    return jnp.min(cut, axis=2), jnp.max(cut, axis=2)


def _ends(seen: Array, axis: int) -> tuple[Array, Array]:
    """The first and the last index along `axis` that is seen, flat; (0, −1) where none is."""
    some, size = jnp.any(seen, axis=axis), seen.shape[axis]
    first = jnp.argmax(seen, axis=axis).astype(jnp.int32)
    last = size - 1 - jnp.argmax(jnp.flip(seen, axis), axis=axis).astype(jnp.int32)
    return jnp.where(some, first, 0).reshape(-1), jnp.where(some, last, -1).reshape(-1)


TABLE = Path(__file__).with_name("tiles.json")
"""`jax.Device.device_kind` → fields of `Tiles`, where others than the defaults are better, or must be.

`axon bench kernels --search` measures, and writes them there.
"""


@cache
def tiles_for(chip: str) -> Tiles:
    """The tiles for a chip, whichever of its names."""
    table, known = json.loads(TABLE.read_text()), chip_of(chip)
    return Tiles(**next((table[kind] for kind in (chip, *(known.kinds if known else ())) if kind in table), {}))
