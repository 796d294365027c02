"""The forward TPU kernel: a tile of queries meets the keys that it sees, a tile of keys after the other.

For each query the running maximum m, the running sum ℓ of the powers and the running output O (Milakov & Gimelshein,
arXiv:1805.02867; Dao et al., arXiv:2205.14135):

    m′ = max(m, max s)    ℓ′ = 2^(m−m′)·ℓ + Σ 2^(s−m′)    O′ = 2^(m−m′)·O + Σ 2^(s−m′)·v

and at the end O/ℓ, and the log-sum-exp m + log ℓ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.attention.forward_tiles import ForwardTiles
from axon.kernels.attention.fp8 import QUERIES
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import Reach
from axon.kernels.attention.tpu_scores import Pair, PerRow, sees_all, table_row
from axon.kernels.attention.tpu_softmax import (
    Columns,
    Keys,
    Scales,
    State,
    begin,
    column_shapes,
    finish,
    meet,
    state_shapes,
)
from axon.kernels.cost import Cost


class Operands(NamedTuple):
    """`q[batch kv_heads group seq head_dim]`, `k, v[batch kv_heads kv_seq head_dim]`, the numbers of their rows, and
    `scales` where they are in e4m3.

    The same of their blocks' specifications, and of the references that a kernel gets.
    """

    q: Any
    k: Any
    v: Any
    per_row: PerRow
    key_documents: Any
    scales: Scales | None = None


def forward(
    config: AttentionConfig,
    cut: ForwardTiles,
    steps: int,
    reach: Reach,
    operands: Operands,
    dtype: Any,
    cost: Cost,
    vmem: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """The output in `dtype`, `batch kv_heads group seq head_dim`, and each query's log-sum-exp, `batch kv_heads tiles 1
    rows`."""
    (q, _, v), grid = operands[:3], cut.grid
    batch, kv_heads, group, length, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, kv_heads, group, length, v.shape[3]), dtype)
    lse = jax.ShapeDtypeStruct((batch, kv_heads, grid.query_tiles, 1, grid.rows), jnp.float32)
    at = _Places(cut)
    rows = pl.BlockSpec((None, None, None, 1, grid.rows), lambda b, h, i, t, reach: (b, h, at.query(i), 0, 0))
    return pl.pallas_call(
        lambda *refs: _Kernel(config, cut, steps, *refs).run(),
        out_shape=(out, lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, grid.query_tiles, steps),
            in_specs=[at.specs(operands)],
            out_specs=(at.queries(v.shape[3]), rows),
            scratch_shapes=[state_shapes(grid, v.shape[3]), column_shapes(config, grid, operands.per_row)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=estimate(cost),
        interpret=interpret,
        name="axon_attention_forward",
    )(reach, operands)


def estimate(cost: Cost) -> pl.CostEstimate:
    """A kernel's cost as XLA's scheduler, and a count of a program's FLOPs, read it."""
    return pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=0)


class _Places:
    """Which part of each array a step of the grid, `batch kv_heads query_tiles steps`, works on."""

    def __init__(self, cut: ForwardTiles):
        self.grid, self.blocks = cut.grid, cut.blocks

    def query(self, i):
        """The tile of queries: first, last, second, last but one, … Where there is one sequence and one head, each of
        a chip's two cores has a half of them, one after the other: under a causal mask they see as many keys."""
        return jnp.where(i & 1 == 0, i >> 1, self.grid.query_tiles - 1 - (i >> 1))

    def key(self, b, i, t, reach):
        """The first block of keys of a step; beyond the last step that sees some, as there: no new fetch."""
        at = (b if reach.query_document is not None else 0) * self.grid.query_tiles + self.query(i)
        first = reach.first[at]
        seen = jnp.minimum(t, lax.div(jnp.maximum(reach.last[at] - first, 0), self.blocks))
        return self.within(first + seen * self.blocks)

    def within(self, key):
        """The block from which to fetch so that all are there."""
        return jnp.minimum(key, self.grid.key_tiles - self.blocks)

    def queries(self, width: int) -> pl.BlockSpec:
        shape = (None, None, self.grid.group, self.grid.queries, width)
        return pl.BlockSpec(shape, lambda b, h, i, t, reach: (b, h, 0, self.query(i), 0))

    def keys(self, width: int) -> pl.BlockSpec:
        size = self.grid.keys
        shape = (None, None, pl.Element(self.blocks * size), pl.Element(width))
        return pl.BlockSpec(shape, lambda b, h, i, t, reach: (b, h, self.key(b, i, t, reach) * size, 0))

    def specs(self, operands: Operands) -> Operands:
        grid, (q, k, v, per_row, of_keys, scales) = self.grid, operands
        documents = pl.BlockSpec((None, None, 1, grid.rows), lambda b, h, i, t, reach: (b, self.query(i), 0, 0))
        per_head = pl.BlockSpec((None, 1, grid.rows), lambda b, h, i, t, reach: (h, 0, 0))
        shape = (None, pl.Element(self.blocks), pl.Element(1), pl.Element(grid.keys))
        key_documents = pl.BlockSpec(shape, lambda b, h, i, t, reach: (b, self.key(b, i, t, reach), 0, 0))
        return Operands(
            self.queries(q.shape[4]),
            self.keys(k.shape[3]),
            self.keys(v.shape[3]),
            PerRow(*(None if x is None else s for x, s in zip(per_row, (documents, per_head, per_head), strict=True))),
            None if of_keys is None else key_documents,
            None if scales is None else Scales(*(self._scales(x.shape[3]) for x in scales)),
        )

    def _scales(self, count: int) -> pl.BlockSpec:
        """All scales of a head, which are read one by one."""
        shape, memory = (None, None, 1, count), pltpu.SMEM
        return pl.BlockSpec(shape, lambda b, h, i, t, reach: (b, h, 0, 0), memory_space=memory)


class _Kernel(NamedTuple):
    """One step of the grid: the references that it gets, and what it does with them."""

    config: AttentionConfig
    cut: ForwardTiles
    steps: int
    reach: Reach
    x: Operands
    out: Any
    lse: Any
    state: State
    columns: Columns

    def run(self) -> None:
        grid, reach, blocks, t = self.cut.grid, self.reach, self.cut.blocks, pl.program_id(3)
        table, tile = table_row(reach), _Places(self.cut).query(pl.program_id(2))
        at = table * grid.query_tiles + tile
        pair = Pair(table, tile, reach.first[at] + t * blocks)
        left = jnp.minimum(reach.last[at] + 1 - pair.key, blocks)
        whole = sees_all(self.config, grid, reach, pair, blocks)

        pl.when(t == 0)(lambda: begin(self.state, self.columns, self.config, grid, reach, tile, self.x.per_row))
        pl.when((left > 0) & whole)(lambda: self.meet_all(pair))
        pl.when((left > 0) & jnp.logical_not(whole))(lambda: self.meet_seen(pair, left))

        @pl.when(t == self.steps - 1)
        def _():
            out, self.lse[...] = finish(self.state)
            self.out[...] = out.reshape(self.out.shape).astype(self.out.dtype)

    def meet_all(self, pair: Pair) -> None:
        """All of a step's blocks, 512 keys at a time, in one run of instructions: the compiler overlaps them."""
        most = max(1, 512 // self.cut.grid.keys)
        for place in range(0, self.cut.blocks, most):
            self.meet(pair._replace(key=pair.key + place), place, min(most, self.cut.blocks - place), masked=0)

    def meet_seen(self, pair: Pair, left: Array) -> None:
        """Of a step's blocks those that are seen, `left` from the pair's on: two at a time, and what then is left.

        Of two only the second is masked where all of the first is seen, as along a causal mask's diagonal.
        """
        skipped = pair.key - _Places(self.cut).within(pair.key)

        def two(number, _):
            done = number * 2
            here, place = pair._replace(key=pair.key + done), skipped + done
            if self.cut.blocks > 1:
                both = left - done >= 2
                whole, first = (sees_all(self.config, self.cut.grid, self.reach, here, blocks) for blocks in (2, 1))
                pl.when(both & whole)(lambda: self.meet(here, place, 2, masked=0))
                pl.when(both & jnp.logical_not(whole) & first)(lambda: self.meet(here, place, 2, masked=1))
                pl.when(both & jnp.logical_not(first))(lambda: self.meet(here, place, 2, masked=2))
            pl.when(left - done == 1)(lambda: self.meet(here, place, 1, masked=1))
            return 0

        lax.fori_loop(0, (left + 1) >> 1, two, 0)

    def meet(self, pair: Pair, place: Array | int, blocks: int, masked: int) -> None:
        """So many blocks from the pair's on, the `place`-th of those fetched; the last are `masked`."""
        x, size = self.x, self.cut.grid.keys
        q = x.q[...].reshape(self.cut.grid.rows, x.q.shape[-1])
        keys = pl.ds(place * size if isinstance(place, int) else pl.multiple_of(place * size, size), blocks * size)
        documents = None
        if masked and x.key_documents is not None:
            documents = jnp.concatenate([x.key_documents[place + i] for i in range(blocks)], axis=1)
        of_keys = Keys(x.k[keys, :], x.v[keys, :], documents, pair.key * size, self.scales(pair, blocks))
        meet(self.state, self.columns, self.config, q, of_keys, masked * size)

    def scales(self, pair: Pair, blocks: int) -> Scales | None:
        """Scales of the tile's rows, and of so many blocks from the pair's on."""
        if self.x.scales is None:
            return None
        (of_q, of_k, of_v), grid = self.x.scales, self.cut.grid
        parts = grid.queries // QUERIES
        of_rows = [
            of_q[0, (head * grid.query_tiles + pair.query) * parts + i]
            for head in range(grid.group)
            for i in range(parts)
        ]
        return Scales(of_rows, *([x[0, pair.key + i] for i in range(blocks)] for x in (of_k, of_v)))
