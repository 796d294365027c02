"""Ragged batches over a paged cache, and what they must give, in float64 NumPy."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.cache import stored as store
from axon.kernels.paged_attention.ragged import AttentionInputs

stored = jax.jit(store, static_argnums=1)

DEAD = (np.nan, 3e4)
"""Keys and values in slots that nobody sees: a cache has no value that is not finite, and any key."""


@dataclass(frozen=True)
class Problem:
    """A call: new rows, the cache before it, and which row is of which sequence."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cache: Cache
    inputs: AttentionInputs

    def rows(self):
        """(sequence, row, position) of every real row."""
        bounds, lens = np.asarray(self.inputs.cu_q_lens), np.asarray(self.inputs.kv_lens)
        for i in range(len(lens)):
            for row in range(bounds[i], bounds[i + 1]):
                yield i, row, int(lens[i] - bounds[i + 1] + row)

    def written(self):
        """(page, slot, row) of every new token."""
        table, size = np.asarray(self.inputs.page_table), self.cache.page_size
        return [(int(table[i, at // size]), at % size, row) for i, row, at in self.rows()]


def values_of(kept, scales):
    kept = np.asarray(kept).astype(np.float64)
    return kept if scales is None else kept * np.asarray(scales, np.float64)[..., None]


@pytest.fixture(scope="session")
def draw_problem():
    """draw_problem(rng, lengths, …): lengths are (queries, kv_len) of each sequence; unowned slots hold `DEAD`."""

    def draw(
        rng,
        lengths,
        *,
        tokens=12,
        heads=4,
        kv_heads=2,
        head_dim=8,
        page_size=4,
        columns=4,
        dtype="float32",
        q="float32",
        sinks=False,
        distance_bias=False,
        alibi_slopes=False,
    ):
        pages = len(lengths) * columns + 3
        table = 1 + rng.permutation(pages - 1)[: len(lengths) * columns].reshape(len(lengths), columns)
        inputs = AttentionInputs(
            jnp.asarray([kv for _, kv in lengths], jnp.int32),
            jnp.asarray(table, jnp.int32),
            jnp.asarray(np.cumsum([0, *(n for n, _ in lengths)]), jnp.int32),
            jnp.asarray(rng.normal(size=heads).astype(np.float32)) if sinks else None,
            jnp.asarray(rng.normal(size=(heads, 2 * columns * page_size - 1)), jnp.float32) if distance_bias else None,
            jnp.asarray(rng.uniform(size=heads), jnp.float32) if alibi_slopes else None,
        )
        shape = (pages, kv_heads, page_size, head_dim)
        parts = []
        for _ in range(2):
            flat = rng.normal(size=(pages * page_size, kv_heads, head_dim)).astype(np.float32)
            kept, scales = stored(jnp.asarray(flat), dtype)
            lift = lambda a: None if a is None else a.reshape(pages, page_size, *a.shape[1:]).swapaxes(1, 2)  # noqa: E731
            parts.append((np.array(lift(kept)), None if scales is None else np.array(lift(scales))))
        old = np.zeros((pages, page_size), bool)
        for (n, kv), row in zip(lengths, table, strict=True):
            for at in range(kv - n):
                old[row[at // page_size], at % page_size] = True
        for (kept, scales), dead_number in zip(parts, DEAD, strict=True):
            dead = np.broadcast_to(~old[:, None], kept.shape[:3])
            if scales is None:
                kept[dead] = dead_number
            else:
                scales[dead] = dead_number
        (keys, key_scales), (values, value_scales) = parts
        optional = lambda a: None if a is None else jnp.asarray(a)  # noqa: E731
        cache = Cache(jnp.asarray(keys), jnp.asarray(values), optional(key_scales), optional(value_scales))
        new = [rng.normal(size=(tokens, count, head_dim)) for count in (heads, kv_heads, kv_heads)]
        assert cache.keys.shape == shape
        return Problem(*(jnp.asarray(a.astype(jnp.dtype(q))) for a in new), cache, inputs)

    return draw


@pytest.fixture(scope="session")
def formula():
    """formula(problem, cache after, config): the output in float64, query by query, zeros for padding."""

    def attend(problem, after, config):
        keys, values = values_of(after.keys, after.key_scales), values_of(after.values, after.value_scales)
        q = np.asarray(problem.q).astype(np.float64)
        out, size = np.zeros_like(q), after.page_size
        group = q.shape[1] // after.kv_heads
        inputs = jax.tree.map(np.asarray, problem.inputs)
        for i, row, at in problem.rows():
            first = 0 if config.window is None else max(0, at - config.window + 1)
            seen = [(inputs.page_table[i, j // size], j % size) for j in range(first, at + 1)]
            for head in range(q.shape[1]):
                k = np.array([keys[page, head // group, slot] for page, slot in seen])
                v = np.array([values[page, head // group, slot] for page, slot in seen])
                s = k @ q[row, head] * config.scale
                s = s if config.soft_cap is None else config.soft_cap * np.tanh(s / config.soft_cap)
                distances = np.arange(first, at + 1) - at
                if (bias := inputs.distance_bias) is not None:
                    s = s + bias[head, bias.shape[1] // 2 + distances]
                if (slopes := inputs.alibi_slopes) is not None:
                    s = s + float(slopes[head]) * distances
                sink = -np.inf if inputs.sinks is None else float(inputs.sinks[head])
                top = max(s.max(), sink)
                weights = np.exp(s - top)
                out[row, head] = weights @ v / (weights.sum() + np.exp(sink - top))
        return out

    return attend


@pytest.fixture(scope="session")
def check_cache():
    """check_cache(problem, cache after): the new rows are where they belong, and all else but page 0 is as it was."""

    def check(problem, after):
        news = stored(problem.k, after.keys.dtype), stored(problem.v, after.keys.dtype)
        before = problem.cache
        pairs = (
            (before.keys, after.keys, news[0][0]),
            (before.values, after.values, news[1][0]),
            (before.key_scales, after.key_scales, news[0][1]),
            (before.value_scales, after.value_scales, news[1][1]),
        )
        for old, made, new in pairs:
            if old is None:
                assert made is None
                continue
            new, expected = np.asarray(new), np.array(old)
            for page, slot, row in problem.written():
                expected[page, :, slot] = new[row]
            np.testing.assert_array_equal(np.asarray(made)[1:].astype(np.float32), expected[1:].astype(np.float32))

    return check


@pytest.fixture(scope="session")
def check_not_finite():
    """check_not_finite(attend, problem, config, number): it is the value of one token's head: those who see it have NaN
    for their outputs, and all others the bits that they have without it."""

    def check(attend, problem, config, number):
        rows, heads = list(problem.rows()), range(problem.q.shape[1])
        group, dim = problem.q.shape[1] // problem.cache.kv_heads, problem.q.shape[2] - 1
        sequence, broken, place = rows[len(rows) // 2]
        v = np.array(problem.v)
        v[broken, 0, dim] = number
        one = replace(problem, v=jnp.asarray(v))
        (before, _), (after, _) = attend(problem, config), attend(one, config)
        window = config.window or one.inputs.page_table.size * one.cache.page_size
        sees = [(row, head) for i, row, at in rows for head in heads if i == sequence and 0 <= at - place < window]
        touched = np.zeros(before.shape, bool)
        for row, head in sees:
            touched[row, head] = head < group
        assert 0 < touched.sum() < touched.size
        np.testing.assert_array_equal(after, np.where(touched, np.nan, before))

    return check
