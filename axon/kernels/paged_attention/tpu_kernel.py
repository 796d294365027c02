"""The Pallas kernel of paged attention: a block of queries a grid step, its sequence's pages streamed through VMEM.

FlashAttention's recurrence (Dao et al., arXiv:2205.14135) over pages that asynchronous copies bring from HBM, two
buffers deep: while one step's pages are attended to, the next step's arrive, the next block's first ones too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from axon.kernels.paged_attention.tpu_stream import PageStream, Shape, Work, tiled

LANES = 128
NOTHING, MASKED = -1e30, -2e30
"""The largest score before any, and a masked one: so much less that exp(MASKED - NOTHING) is 0."""


@dataclass(frozen=True)
class Running:
    """Of each head of keys and row: largest score, Σ exp(score - top) (in every lane), and Σ exp(score - top)·value."""

    top: Any
    total: Any
    sums: Any

    def first(self, rows: int) -> "Running":
        """The accumulators of the first rows."""
        return Running(*(ref.at[:, pl.ds(0, rows)] for ref in (self.top, self.total, self.sums)))

    def clear(self) -> None:
        """Before any key."""
        self.top[...] = jnp.full(self.top.shape, NOTHING, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.sums[...] = jnp.zeros(self.sums.shape, jnp.float32)

    def sink(self, sinks: Any) -> None:
        """Before any key, of each row a score whose weight is 1 and whose value is 0."""
        self.top[...] = sinks[...]
        self.total[...] = jnp.ones(self.total.shape, jnp.float32)

    def add(self, head: int, scores: Any, values: Any, scales: Any, lanes: bool) -> None:
        """One step's `rows keys` scores and `keys head_dim` values; or `head_dim keys` ones, if these are `lanes`."""
        before = self.top[head]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(before - top)
        weights = jnp.exp(scores - top[:, :1])
        self.top[head] = top
        self.total[head] = self.total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        weights = weights if scales is None else weights * scales
        product = _dot(weights.astype(values.dtype), values, (1, 1) if lanes else (1, 0))
        self.sums[head] = self.sums[head] * shrink[:, :1] + product

    def give(self, output: Any, queries: int) -> None:
        """The output of a block's first queries, `1 queries heads head_dim`."""
        for head, heads in _groups(self.sums, output):
            rows = slice(queries * (heads.stop - heads.start))
            found = self.sums[head, rows] / _not_zero(self.total[head, rows])[:, :1]
            output[0, :queries, heads] = found.reshape(queries, -1, found.shape[-1]).astype(output.dtype)

    def give_part(self, output: Any, lse: Any) -> None:
        """Of a part of a block's pages the output `1 1 kv_heads rows head_dim`, and log-sum-exp in every lane."""
        total = _not_zero(self.total[...])
        output[...] = (self.sums[...] / total[..., :1]).reshape(output.shape)
        lse[...] = (self.top[...] + jnp.log(total)).reshape(lse.shape)


@dataclass(frozen=True)
class Rows:
    """A block's queries `kv_heads (queries group) head_dim`, and of each row, in every lane, what its head has: the
    sink, and the slope of ALiBi; None for those that are absent."""

    q: Any
    sinks: Any
    slopes: Any

    def first(self, rows: int) -> "Rows":
        """The first rows."""
        return Rows(*(None if ref is None else ref.at[:, pl.ds(0, rows)] for ref in (self.q, self.sinks, self.slopes)))

    def take(self, given: Any, queries: int) -> None:
        """The first queries of a block `1 queries heads head_dim` as rows."""
        for head, heads in _groups(self.q, given):
            own = given[0, :queries, heads]
            self.q[head, : queries * own.shape[1]] = own.reshape(-1, own.shape[-1])


def attend(shape: Shape, scaled: bool, of_rows: Sequence[bool], *refs: Any) -> None:
    """The kernel: one block's queries over one part of its pages.

    `scaled`: whether the cache is quantised; `of_rows`: whether there are sinks, and slopes.
    """
    rest = iter(refs)
    arrays, results = 4 if scaled else 2, 1 if shape.splits == 1 else 2
    work, given = Work(*islice(rest, 5)), next(rest)
    of_heads = [next(rest) if there else None for there in of_rows]
    pages, outputs, buffers = (list(islice(rest, count)) for count in (arrays, results, arrays))
    arrived, slot, *running, q = rest
    stream, sums, rows = PageStream(work, shape, pages, buffers, arrived), Running(*running), Rows(q, *of_heads)
    share, part = lax.div(pl.program_id(0), shape.splits), lax.rem(pl.program_id(0), shape.splits)
    block, following = (index * shape.shares + share for index in (pl.program_id(1), pl.program_id(1) + 1))
    first, last = work.steps(block, part, shape)

    @pl.when(pl.program_id(1) == 0)
    def _():
        slot[0] = 0
        stream.clear_values()
        stream.start_first(block, part, 0)

    live = partial(_live, shape, work.ends[block] - work.positions[block])

    def few(of, queries):
        return of.first(tiled(queries * shape.group))

    @live
    def _(queries):
        own, here = few(rows, queries), few(sums, queries)
        own.take(given, queries)
        here.clear()
        if own.sinks is not None:
            pl.when(part == 0)(lambda: here.sink(own.sinks))

    def step(index, here):
        there = 1 - here

        @pl.when(index + 1 < last)
        def _():
            stream.start(block, index + 1, there)

        @pl.when(index + 1 == last)
        def _():
            stream.start_first(following, part, there)

        stream.wait(block, index, here)
        live(lambda queries: _attend_step(few(rows, queries), stream, here, block, index, few(sums, queries)))
        return there

    slot[0] = lax.fori_loop(first, last, step, slot[0])

    @pl.when(first == last)
    def _():
        stream.start_first(following, part, slot[0])

    if len(outputs) == 1:
        live(lambda queries: sums.give(outputs[0], queries))
    else:
        sums.give_part(*outputs)


def _live(shape: Shape, count: Any, act: Callable[[int], None]) -> None:
    """`act` on the queries of a block with `count` of them: on one if that is all there is, as of a decoding sequence
    in a batch with prefills, which so does not pay for the others; else on as many as there may be. With none nothing
    is done, and what the block gives is anything."""
    pl.when(count == 1)(lambda: act(1))
    if shape.queries > 1:
        pl.when(count > 1)(lambda: act(shape.queries))


def _groups(of_kv_heads: Any, of_heads: Any) -> Iterator[tuple[int, slice]]:
    """Each head of keys of `kv_heads …`, and those that share it of `1 queries heads …`."""
    count, heads = of_kv_heads.shape[0], of_heads.shape[2]
    return ((head, slice(head * heads // count, (head + 1) * heads // count)) for head in range(count))


def _attend_step(of_rows: Rows, stream: PageStream, slot: Any, block: Any, index: Any, running: Running) -> None:
    """One step's pages, head by head of keys."""
    work, shape, buffers = stream.work, stream.shape, stream.buffers
    start = (work.columns[block] + index * shape.width) * shape.page_size
    q, slopes = of_rows.q, of_rows.slopes
    heads, rows, _ = q.shape
    queries = work.positions[block] + lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(shape.group))
    places = lax.broadcasted_iota(jnp.int32, (1, shape.keys), 1)
    seen = shape.config.seen(queries, start + places)
    ahead = (start + places - queries).astype(jnp.float32)
    scales = [_in_a_row(buffer, slot, shape) for buffer in buffers[2:]]
    for head in range(heads):
        key_scales, value_scales = (row[head : head + 1] for row in scales) if scales else (None, None)
        keys, values = (_head(buffer, slot, head, q.dtype, shape) for buffer in buffers[:2])
        products = _dot(q[head], keys, (1, 0) if shape.lanes else (1, 1))
        products = products if key_scales is None else products * key_scales
        scores = shape.config.finish(products)
        scores = scores if slopes is None else scores + slopes[head][:, :1] * ahead
        running.add(head, jnp.where(seen, scores, MASKED), values, value_scales, shape.lanes)


def _head(buffer: Any, slot: Any, head: int, dtype: Any, shape: Shape) -> Any:
    """`keys head_dim` of one head; or, if tokens lie along lanes, `head_dim keys`."""
    if shape.lanes:
        return jnp.concatenate([buffer[slot, place, head].astype(dtype) for place in range(shape.width)], axis=1)
    own = buffer[slot, :, head].astype(dtype)
    return own.reshape(-1, own.shape[-1])


def _in_a_row(buffer: Any, slot: Any, shape: Shape) -> Any:
    """`kv_heads keys`: a step's scales, the pages concatenated."""
    return jnp.concatenate([buffer[slot, place] for place in range(shape.width)], axis=1)


def _not_zero(total: Any) -> Any:
    """1 of a row without any key, whose sums are 0."""
    return jnp.where(total == 0, 1, total)


def _dot(a: Any, b: Any, summed: tuple[int, int]) -> Any:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
