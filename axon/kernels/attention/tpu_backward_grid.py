"""The grid of the backward kernel: `batch kv_heads spans key_tiles steps`.

A tile of keys stays while the tiles of queries that see it pass, one a step: so many steps as the tile of keys needs
that is seen by most. A span is a part of the queries with a pass of its own over the keys: one, unless the gradients of
the queries that are under way do not fit in VMEM, or a core would have nothing to do. Tiles of queries are dealt to
spans to and fro, so that under a causal mask, where the last sees most keys, every span has as much to do.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from axon.kernels.attention.mask import Mask
from axon.kernels.attention.tiles import LANES, Grid, Reach


@dataclass(frozen=True)
class Spans:
    """How the tiles of queries are dealt to spans, and how many of a span see one tile of keys at most.

    Args:
        count: of spans. tiles: of queries in each; the last may be beyond the last there is. steps: see above.
    """

    count: int
    tiles: int
    steps: int

    @classmethod
    def of(cls, grid: Grid, mask: Mask, start: int | None, width: int, dq_vmem: int, least: int = 1) -> "Spans":
        """At least so many spans, so that the gradients under way, of `width`, fit in `dq_vmem` bytes of each."""
        fitting = max(1, dq_vmem // (grid.rows * -(-width // LANES) * LANES * 4))
        seen = _seen(grid, mask, start)
        most = max(1, int(np.max(seen[1] - seen[0])))
        for count in range(min(max(least, -(-most // fitting)), grid.query_tiles), grid.query_tiles):
            found = cls._with(grid, count, seen)
            if found.steps <= fitting:
                return found
        return cls._with(grid, grid.query_tiles, seen)

    @classmethod
    def _with(cls, grid: Grid, count: int, seen: tuple[np.ndarray, np.ndarray]) -> "Spans":
        tiles = -(-grid.query_tiles // count)
        place = cls(count, tiles, 1).place(np.arange(count)[:, None, None], np.arange(tiles)[:, None])
        return cls(count, tiles, max(1, int(np.max(np.sum((seen[0] <= place) & (place < seen[1]), axis=1)))))

    def place(self, span: Any, tile: Any) -> Any:
        """The number among all tiles of queries of a span's tile: 0, 3, 4, 7, … and 1, 2, 5, 6, … of two spans."""
        return tile * self.count + span + (tile % 2) * (self.count - 1 - 2 * span)


def _seen(grid: Grid, mask: Mask, start: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Half-open ranges of tiles of queries that see a tile of keys: of each, or for a traced start all there may be."""
    if start is not None:
        low, high = grid.key_range(mask, start, np)
        key = np.arange(grid.key_tiles)
        sees = (low[:, None] <= key) & (key < high[:, None])
        first, last = np.argmax(sees, axis=0), grid.query_tiles - np.argmax(sees[::-1], axis=0)
        return first, np.where(np.any(sees, axis=0), last, first)
    index = np.arange(-grid.real_queries, grid.real_keys + grid.real_queries)
    low, high, key = mask.low(index), mask.high(index), np.arange(grid.key_tiles) * grid.keys
    begin = 0 if high is None else np.searchsorted(high, key, "right")
    end = index.size if low is None else np.searchsorted(low, key + grid.keys, "left")
    most = (int(np.max(end - begin)) + grid.queries - 2) // grid.queries + 1
    first = np.arange(grid.query_tiles)
    return first, np.minimum(first + most, grid.query_tiles)


class Tables(NamedTuple):
    """Tables that the backward looks up in scalar memory.

    Attributes:
        reach: of the whole attention.
        first, last: for each row of the tables, span and tile of keys, flat, the first tile of the span's queries that
            sees it and the last, by their numbers in the span; last < first for none.
    """

    reach: Reach
    first: Array
    last: Array

    @classmethod
    def of(cls, grid: Grid, spans: Spans, reach: Reach) -> "Tables":
        place = spans.place(np.arange(spans.count)[:, None], np.arange(spans.tiles))[:, None]
        first, last = (x.reshape(-1, 1, grid.key_tiles, 1) for x in (reach.first_query, reach.last_query))
        before, until = (jnp.sum(x, axis=3, dtype=jnp.int32) for x in (place < first, place <= last))
        return cls(reach, before.reshape(-1), until.reshape(-1) - 1)


@dataclass(frozen=True)
class Step:
    """A step of the grid, in the kernel or for an index map: its tile of keys, and the tile of queries that it meets.

    Args:
        table: the row of the tables. span, key, step: the place in the grid.
    """

    grid: Grid
    spans: Spans
    tables: Tables
    table: Any
    span: Any
    key: Any
    step: Any

    @property
    def _ends(self) -> tuple[Any, Any]:
        at = (self.table * self.spans.count + self.span) * self.grid.key_tiles + self.key
        return self.tables.first[at], self.tables.last[at]

    @property
    def tile(self) -> Any:
        """The tile of queries, by its number in the span; where there is none, the nearest: it is not fetched again."""
        first, last = self._ends
        return jnp.clip(jnp.minimum(first + self.step, last), 0, self.spans.tiles - 1)

    @property
    def query(self) -> Any:
        """The tile of queries, by its number among all."""
        return jnp.minimum(self.spans.place(self.span, self.tile), self.grid.query_tiles - 1)

    @property
    def there(self) -> Any:
        """Whether the step has a tile of queries, which sees this tile of keys or one before and one after it."""
        first, last = self._ends
        least, most = self.keys_of(self.query)
        return (first + self.step <= last) & (least <= self.key) & (self.key <= most)

    def keys_of(self, query: Any) -> tuple[Any, Any]:
        """The first and the last tile of keys that a tile of queries sees."""
        at = self.table * self.grid.query_tiles + query
        return self.tables.reach.first[at], self.tables.reach.last[at]


class Places:
    """Which tile of each array a step works on."""

    def __init__(self, grid: Grid, spans: Spans):
        self.grid, self.spans = grid, spans

    def step(self, tables: Tables, b: Any, s: Any, j: Any, t: Any) -> Step:
        """The step at a place of the grid."""
        table = 0 if tables.reach.query_document is None else b
        return Step(self.grid, self.spans, tables, table, s, j, t)

    def queries(self, width: int) -> pl.BlockSpec:
        """Of `batch kv_heads group seq width`."""
        shape = (None, None, self.grid.group, self.grid.queries, width)
        return pl.BlockSpec(shape, lambda b, h, s, j, t, tables: (b, h, 0, self.step(tables, b, s, j, t).query, 0))

    def keys(self, width: int) -> pl.BlockSpec:
        """Of `batch kv_heads kv_seq width`."""
        return pl.BlockSpec((None, None, self.grid.keys, width), lambda b, h, s, j, t, tables: (b, h, j, 0))

    def summed(self, width: int) -> pl.BlockSpec:
        """Of `batch kv_heads spans kv_seq width`."""
        return pl.BlockSpec((None, None, None, self.grid.keys, width), lambda b, h, s, j, t, tables: (b, h, s, j, 0))

    def rows(self) -> pl.BlockSpec:
        """Of `batch kv_heads tiles 1 rows`."""
        shape = (None, None, None, 1, self.grid.rows)
        return pl.BlockSpec(shape, lambda b, h, s, j, t, tables: (b, h, self.step(tables, b, s, j, t).query, 0, 0))

    def documents(self) -> pl.BlockSpec:
        """Of `batch tiles 1 rows`."""
        shape = (None, None, 1, self.grid.rows)
        return pl.BlockSpec(shape, lambda b, h, s, j, t, tables: (b, self.step(tables, b, s, j, t).query, 0, 0))

    def key_documents(self) -> pl.BlockSpec:
        """Of `batch tiles 1 keys`."""
        return pl.BlockSpec((None, None, 1, self.grid.keys), lambda b, h, s, j, t, tables: (b, j, 0, 0))

    def per_head(self) -> pl.BlockSpec:
        """Of `kv_heads 1 rows`."""
        return pl.BlockSpec((None, 1, self.grid.rows), lambda b, h, s, j, t, tables: (h, 0, 0))
