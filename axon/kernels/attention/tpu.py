"""Flash attention on TPUs, forward and backward: our own Pallas kernels (Dao, arXiv:2307.08691).

The heads of a group are rows of one tile, so that their keys are read once. Tiles of keys that no query of a tile sees,
by the mask's indices and the documents, are neither fetched nor computed; only tiles that are partly seen are masked.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.backward_tiles import Tiling, choose_tiling
from axon.kernels.attention.cost import backward_cost, forward_cost
from axon.kernels.attention.flash import differentiable
from axon.kernels.attention.forward_tiles import forward_tiles
from axon.kernels.attention.fp8 import KEYS, QUERIES, quantized_operands
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.tiles import LANES, Grid, Tiles, reach
from axon.kernels.attention.tpu_backward import backward
from axon.kernels.attention.tpu_backward_grid import Spans, Tables
from axon.kernels.attention.tpu_forward import Operands, forward
from axon.kernels.attention.tpu_scores import LOG2E, PerRow
from axon.kernels.attention.tpu_softmax import Scales


def attention_tpu(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs = AttentionInputs(),
    *,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`. Operands of float16 are computed in float32."""
    dtype, (batch, queries, heads, _) = q.dtype, q.shape
    kernels = _Kernels.of(config, inputs, dtype, tiles, interpret)
    parts = kernels.tiles.group_parts(heads // k.shape[2])
    q = _by_group(_computed(q), k.shape[2] * parts)
    k, v = (jnp.repeat(_computed(x).swapaxes(1, 2), parts, axis=1) for x in (k, v))
    if inputs.alibi_slopes is not None:
        inputs = inputs._replace(alibi_slopes=lax.stop_gradient(inputs.alibi_slopes))
    attend = differentiable(kernels.forward, kernels.backward)
    out, lse = attend(q, k, v, inputs._replace(start=jnp.asarray(inputs.start, jnp.int32)))
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, v.shape[3])
    return out.astype(dtype), lse.reshape(batch, heads, queries).swapaxes(1, 2)


def attention_gradients_tpu(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
    *,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """See `axon.kernels.attention.attention_gradients`; in the dtype of the operands."""
    kernels = _Kernels.of(config, inputs, q.dtype, tiles, interpret)
    inputs = inputs._replace(start=jnp.asarray(inputs.start, jnp.int32))
    parts = kernels.tiles.group_parts(q.shape[2] // k.shape[2])
    kv_heads = k.shape[2] * parts
    of_rows = tuple(_by_group(x, kv_heads) for x in (_computed(rows[0]), rows[1][..., None], rows[2][..., None]))
    of_rows = of_rows[0], of_rows[1][..., 0], of_rows[2][..., 0]
    k, v = (jnp.repeat(_computed(x).swapaxes(1, 2), parts, axis=1) for x in (k, v))
    dq, dk, dv = kernels.backward(_by_group(_computed(q), kv_heads), k, v, inputs, of_rows)
    dk, dv = (_summed_parts(x, parts).swapaxes(1, 2) for x in (dk, dv))
    return dq.transpose(0, 3, 1, 2, 4).reshape(q.shape), dk, dv


def _summed_parts(x: Array, parts: int) -> Array:
    """`batch kv_heads·parts …` → `batch kv_heads …`, summed in float32."""
    if parts == 1:
        return x
    apart = x.reshape(x.shape[0], -1, parts, *x.shape[2:])
    return jnp.sum(apart, axis=2, dtype=jnp.float32).astype(x.dtype)


def _computed(x: Array) -> Array:
    """In the dtype that the kernels compute in."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _by_group(x: Array, kv_heads: int) -> Array:
    """`batch seq heads head_dim` → `batch kv_heads group seq head_dim`."""
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


@dataclass(frozen=True)
class _Kernels:
    """Both kernels, of `q[batch kv_heads group seq head_dim]` and `k, v[batch kv_heads kv_seq head_dim]`.

    `start` is that of `AttentionInputs` where it is a constant, with which fewer steps of the grid are needed.
    """

    config: AttentionConfig
    tiles: Tiles
    interpret: Any
    start: int | None

    @classmethod
    def of(
        cls, config: AttentionConfig, inputs: AttentionInputs, dtype: Any, tiles: Tiles, interpret: Any
    ) -> "_Kernels":
        """For operands of `dtype`."""
        tiles = tiles if dtype == jnp.bfloat16 else tiles.halved()
        return cls(config, tiles, interpret, inputs.constant_start)

    def forward(self, q: Array, k: Array, v: Array, inputs: AttentionInputs) -> tuple[Array, Array]:
        """Output and log-sum-exp, `batch kv_heads group seq`."""
        mask, tiles, dtype, scales = self.config.mask, self.tiles, q.dtype, None
        least = LANES if self.config.products is None else KEYS
        cut = forward_tiles(tiles, mask, q.shape[2], q.shape[3], k.shape[2], self.start, least)
        if self.config.products is not None:
            (q, k, v), scales = _in_e4m3(cut.grid, q, k, v)
        grid, steps = cut.grid, cut.steps(mask, inputs.start if self.start is None else self.start)
        operands = _operands(grid, grid.query_tiles, q, k, v, self.config, inputs)._replace(scales=scales)
        cost = forward_cost(mask, q, k, v, self.start)
        tables = reach(grid, mask, inputs)
        out, lse = forward(self.config, cut, steps, tables, operands, dtype, cost, tiles.vmem, self.interpret)
        return out[:, :, :, : q.shape[3]], _untiled(grid, lse)

    def backward(
        self, q: Array, k: Array, v: Array, inputs: AttentionInputs, rows: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Of dO, the log-sum-exp and D of each query."""
        mask, tiles = self.config.mask, self.tiles
        group, queries, keys = q.shape[2], q.shape[3], k.shape[2]
        cut = choose_tiling(mask, tiles, group, queries, keys, self.start)
        grid, count = cut.tile, cut.tile.query_tiles
        least = tiles.cores if q.shape[0] * q.shape[1] % tiles.cores else 1  # else a core would have nothing to do
        spans = Spans.of(grid, mask, self.start, q.shape[4], tiles.dq_vmem, least)
        operands = _operands(grid, count, q, k, v, self.config, inputs)
        operands = operands._replace(per_row=jax.tree.map(lambda x: _by_block(cut, x), operands.per_row))
        dout, lse, total = rows
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
        rows = (
            _padded(dout, 3, count * grid.queries),
            _by_block(cut, _tiled(grid, count, lse, jnp.inf)),
            _by_block(cut, _tiled(grid, count, total, 0.0)),
        )
        cost = backward_cost(mask, q, k, v, self.start)
        tables = Tables.of(grid, spans, reach(grid, mask, inputs))
        dq, dk, dv = backward(self.config, cut, spans, tables, operands, rows, cost, tiles.vmem, self.interpret)
        return dq[:, :, :, : q.shape[3]], dk[:, :, :keys].astype(k.dtype), dv[:, :, :keys].astype(v.dtype)


def _in_e4m3(grid: Grid, q: Array, k: Array, v: Array) -> tuple[tuple[Array, Array, Array], Scales]:
    """Their values, and scales, `batch kv_heads 1 blocks`: those of queries by head of a group, of whole tiles."""
    operands = quantized_operands(q, k, v)
    of_q = _padded(operands[0].scales, 3, grid.query_tiles * grid.queries // QUERIES)
    values = operands[0].values, operands[1].values, operands[2].values
    return values, Scales(*(x.reshape(*x.shape[:2], 1, -1) for x in (of_q, operands[1].scales, operands[2].scales)))


def _by_block(cut: Tiling, x: Array) -> Array:
    """`… rows` of tiles, those of each head of a group, → those of each block of queries, and in it of each head."""
    blocks = x.reshape(*x.shape[:-1], cut.tile.group, cut.query_blocks, cut.block.queries)
    return blocks.swapaxes(-3, -2).reshape(x.shape)


def _operands(
    grid: Grid, query_tiles: int, q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs
) -> Operands:
    """Padded to whole tiles, with the numbers of heads and queries expanded to one for each row."""
    queries, keys = query_tiles * grid.queries, grid.key_tiles * grid.keys
    documents = of_keys = None
    if config.mask.by_document and inputs.documents is not None:
        documents = _padded(inputs.documents[0], 1, queries).reshape(-1, query_tiles, 1, 1, grid.queries)
        documents = jnp.tile(documents, (1, 1, 1, grid.group, 1)).reshape(-1, query_tiles, 1, grid.rows)
        of_keys = _padded(inputs.documents[1], 1, keys).reshape(-1, grid.key_tiles, 1, grid.keys)
    sinks, alibi_slopes = (None if x is None else _per_head(grid, x) for x in (inputs.sinks, inputs.alibi_slopes))
    per_row = PerRow(documents, sinks, alibi_slopes)
    return Operands(_padded(q, 3, queries), _padded(k, 2, keys), _padded(v, 2, keys), per_row, of_keys)


def _per_head(grid: Grid, x: Array) -> Array:
    """`heads` → `kv_heads 1 rows`, float32."""
    x = x.astype(jnp.float32).reshape(-1, 1, grid.group, 1)
    return jnp.broadcast_to(x, (*x.shape[:3], grid.queries)).reshape(-1, 1, grid.rows)


def _padded(x: Array, axis: int, size: int) -> Array:
    missing = size - x.shape[axis]
    return x if not missing else jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def _untiled(grid: Grid, x: Array) -> Array:
    """`batch kv_heads tiles 1 rows` → `batch kv_heads group seq`."""
    x = x.reshape(*x.shape[:3], grid.group, grid.queries).swapaxes(2, 3)
    return x.reshape(*x.shape[:3], -1)[..., : grid.real_queries]


def _tiled(grid: Grid, query_tiles: int, x: Array, fill: float) -> Array:
    """`batch kv_heads group seq` → `batch kv_heads tiles 1 rows`; `fill` for padding."""
    missing = query_tiles * grid.queries - x.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=fill)
    x = x.reshape(*x.shape[:3], query_tiles, grid.queries).swapaxes(2, 3)
    return x.reshape(*x.shape[:3], 1, grid.rows)
