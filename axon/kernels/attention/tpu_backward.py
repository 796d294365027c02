"""The backward TPU kernel: one pass for all three gradients, five products a pair of tiles.

With the weights P = 2^(s − lse) recomputed, dP = v·dOᵀ and D = Σ O·dO − dlse for each query (Dao, arXiv:2307.08691):

    dS = P ∘ (dP − D)    dv += P·dO    dk += dS·q    dq += dSᵀ·k

A tile of keys stays in VMEM while the tiles of queries that see it pass, so dk and dv accumulate there; so does dq, in
float32, for as many tiles of queries as see one tile of keys, and is written when the last tile of keys that they see
has passed. A sequence of which too many do is cut into spans, whose parts of dk and dv are summed.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.attention.backward_tiles import Pattern, Tiling
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import Reach
from axon.kernels.attention.tpu_backward_grid import Places, Spans, Step, Tables
from axon.kernels.attention.tpu_backward_scores import Part, column, part_masked, part_scores
from axon.kernels.attention.tpu_forward import Operands, estimate
from axon.kernels.attention.tpu_scores import Pair, PerRow, matmul, sees_all
from axon.kernels.cost import Cost


def backward(
    config: AttentionConfig,
    cut: Tiling,
    spans: Spans,
    tables: Tables,
    operands: Operands,
    rows: tuple[Array, Array, Array],
    cost: Cost,
    vmem: int,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Gradients of q, in its dtype, and of k and v, float32 where spans were summed.

    `rows`: dO, like q, and for each query, `batch kv_heads tiles 1 rows`, the log-sum-exp in base 2, infinite where no
    key is seen, and D. Rows are in the order of `axon.kernels.attention.tpu_backward_scores`.
    """
    (q, k, v), (dout, lse, total) = operands[:3], rows
    grid, places = cut.tile, Places(cut.tile, spans)
    summed = jnp.float32 if spans.count > 1 else k.dtype
    of_span = (*q.shape[:2], spans.count)
    dq, dk, dv = pl.pallas_call(
        lambda *refs: _kernel(config, cut, spans, *refs),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*of_span, *k.shape[2:]), summed),
            jax.ShapeDtypeStruct((*of_span, *v.shape[2:]), summed),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*of_span, grid.key_tiles, spans.steps),
            in_specs=[_specs(places, operands), places.queries(dout.shape[4]), places.rows(), places.rows()],
            out_specs=(pl.BlockSpec(memory_space=pl.ANY), places.summed(k.shape[3]), places.summed(v.shape[3])),
            scratch_shapes=[
                pltpu.VMEM((spans.steps, grid.rows, q.shape[4]), jnp.float32),
                pltpu.VMEM((grid.keys, k.shape[3]), jnp.float32),
                pltpu.VMEM((grid.keys, v.shape[3]), jnp.float32),
                pltpu.VMEM((grid.group, grid.queries, q.shape[4]), q.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=estimate(cost),
        interpret=interpret,
        name="axon_attention_backward",
    )(tables, operands, dout, lse, total)
    return dq, jnp.sum(dk, axis=2), jnp.sum(dv, axis=2)


def _specs(places: Places, operands: Operands) -> Operands:
    q, k, v, per_row, of_keys, _ = operands
    specs = places.documents(), places.per_head(), places.per_head()
    return Operands(
        places.queries(q.shape[4]),
        places.keys(k.shape[3]),
        places.keys(v.shape[3]),
        PerRow(*(None if x is None else spec for x, spec in zip(per_row, specs, strict=True))),
        None if of_keys is None else places.key_documents(),
    )


@dataclass(frozen=True)
class _Sums:
    """References to the gradients: of queries one tile for each step of a pass, of keys and of values one tile."""

    q: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class _Rows:
    """References to what comes for each row of a tile of queries, besides q."""

    dout: Any
    lse: Any
    total: Any


def _kernel(
    config: AttentionConfig,
    cut: Tiling,
    spans: Spans,
    tables: Tables,
    x: Operands,
    dout,
    lse,
    total,
    dq,
    dk,
    dv,
    *scratch,
):
    sums, writer = _Sums(*scratch[:3]), _Writer(cut, dq, pl.program_id(0), pl.program_id(1), *scratch[3:])
    key, t = pl.program_id(3), pl.program_id(4)
    step = Places(cut.tile, spans).step(tables, pl.program_id(0), pl.program_id(2), key, t)
    there, query, slot = step.there, step.query, lax.rem(step.tile, spans.steps)
    least, most = step.keys_of(query)
    pair = _Pair(config, cut, tables.reach, Pair(step.table, query, key), x, _Rows(dout, lse, total), sums, slot)

    @pl.when((key == 0) & (t == 0))
    def _():
        writer.begin()
        lax.fori_loop(0, spans.tiles, lambda tile, _: _write_unseen(step, tile, writer), None)

    @pl.when(t == 0)
    def _():
        sums.k[...] = jnp.zeros(sums.k.shape, jnp.float32)
        sums.v[...] = jnp.zeros(sums.v.shape, jnp.float32)

    @pl.when(there & (key == least))
    def _():
        sums.q[slot] = jnp.zeros(sums.q.shape[1:], jnp.float32)

    pl.when(there)(pair.meet)

    @pl.when(there & (key == most))
    def _():
        writer.write(query, sums.q[slot] * config.scale)

    @pl.when(t == spans.steps - 1)
    def _():
        dk[...] = (sums.k[...] * config.scale).astype(dk.dtype)
        dv[...] = sums.v[...].astype(dv.dtype)

    pl.when((key == cut.tile.key_tiles - 1) & (t == spans.steps - 1))(writer.wait)


def _write_unseen(step: Step, tile: Any, writer: "_Writer") -> None:
    """The gradient of a tile of the span whose queries see no key: no step has it."""
    grid, place = step.grid, step.spans.place(step.span, tile)
    least, most = step.keys_of(jnp.minimum(place, grid.query_tiles - 1))

    @pl.when((place < grid.query_tiles) & (most < least))
    def _():
        writer.write(place, jnp.zeros((grid.rows, writer.width), jnp.float32))


@dataclass(frozen=True)
class _Pair:
    """A tile of queries and one of keys, and where their parts of the gradients are added; `slot`: of `sums.q`."""

    config: AttentionConfig
    cut: Tiling
    reach: Reach
    tiles: Pair
    x: Operands
    rows: _Rows
    sums: _Sums
    slot: Any

    @property
    def first(self) -> tuple[Any, Any]:
        """The indices of the first query, among the keys, and of the first key."""
        grid = self.cut.tile
        return self.reach.start[0] + self.tiles.query * grid.queries, self.tiles.key * grid.keys

    def meet(self) -> None:
        """All pairs where all are seen, else those of the first pattern that covers them, masked."""
        whole = sees_all(self.config, self.cut.tile, self.reach, self.tiles) if self.cut.whole else jnp.bool_(False)
        if self.cut.whole:
            pl.when(whole)(lambda: self.add(self.cut.full, partly=False))
        if self.cut.patterns:
            needs, taken = list(self.cut.needs(self.config.mask, *self.first)), whole
            for pattern in self.cut.patterns:
                covers = self.cut.covers(pattern, needs) & jnp.logical_not(taken)
                pl.when(covers)(functools.partial(self.add, pattern, partly=True))
                taken |= covers

    def add(self, pattern: Pattern, partly: bool) -> None:
        """What the pairs of a pattern add to the gradients."""
        documents = None
        if partly and self.x.per_row.documents is not None:
            documents = self.x.per_row.documents[...], column(self.x.key_documents[...])
        for rectangle in self.cut.rectangles(pattern):
            self._add(Part(self.cut, rectangle, *self.first), partly, documents)

    def _add(self, part: Part, partly: bool, documents: tuple[Array, Array] | None) -> None:
        rows, keys, sums = part.rows, part.keys, self.sums
        q, do, k = part.of_queries(self.x.q), part.of_queries(self.rows.dout), self.x.k[keys]
        found, slope = part_scores(q, k, self.config, part, self.x.per_row.alibi_slopes)
        if partly:
            found = part_masked(found, self.config, part, documents)
        weights = jnp.exp2(found - self.rows.lse[:, rows])
        dscores = weights * (matmul(self.x.v[keys], do, (1, 1)) - self.rows.total[:, rows])
        dscores = (dscores if slope is None else dscores * slope).astype(q.dtype)
        sums.v[keys] += matmul(weights.astype(q.dtype), do, (1, 0))
        sums.k[keys] += matmul(dscores, q, (1, 0))
        sums.q[self.slot, rows] += matmul(dscores, k, (0, 0))


@dataclass(frozen=True)
class _Writer:
    """Copies finished tiles of dq to HBM, one at a time, while the next are computed.

    Args:
        dq: the output. batch, head: where in it. tile: what is being copied. busy: 1 from the first copy on.
    """

    cut: Tiling
    dq: Any
    batch: Any
    head: Any
    tile: Any
    busy: Any
    copied: Any

    @property
    def width(self) -> int:
        return self.tile.shape[2]

    def begin(self) -> None:
        """Nothing is on its way."""
        self.busy[0] = 0

    def write(self, query: Any, rows: Array) -> None:
        """Begin to copy a tile of queries, `rows width`."""
        self.wait()
        block = self.cut.block
        for number in range(self.cut.query_blocks):
            of_block = rows[number * block.rows : (number + 1) * block.rows]
            place = slice(number * block.queries, (number + 1) * block.queries)
            self.tile[:, place] = of_block.reshape(block.group, block.queries, self.width).astype(self.tile.dtype)
        self._copy(query).start()
        self.busy[0] = 1

    def wait(self) -> None:
        """Until the last copy is there."""
        pl.when(self.busy[0] == 1)(lambda: self._copy(0).wait())

    def _copy(self, query: Any) -> Any:
        size = self.cut.tile.queries
        place = pl.ds(pl.multiple_of(query * size, size), size)
        return pltpu.make_async_copy(self.tile, self.dq.at[self.batch, self.head, :, place], self.copied)
