"""Ring attention: keys and values travel between the devices that split a sequence, while each meets its own queries.

(Liu et al., arXiv:2310.01889.) Outputs over parts of the keys are merged by their log-sum-exps, in float32 and exactly.
The backward is a ring too: keys and values travel again, and with them their gradients, which arrive at home; of the
forward only the output and each query's log-sum-exp are saved. What the next step needs is sent before this step's
products, so that it travels meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from axon.kernels.attention import NAME, AttentionConfig, AttentionInputs, attention_gradients, attention_part
from axon.parallel.context.route import HIGH, LOW, Pair, Problem, Route, in_order


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    route: Route,
    documents: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of a device's part of a sequence over all of it, in a region that is manual over the route's mesh axes.

    Args:
        q: `batch seq heads head_dim`; k, v: `batch seq kv_heads head_dim`: the device's two chunks, low and high.
        documents: the document of each of its positions, `batch seq`. sinks: `heads`.

    Returns: `batch seq heads head_dim`, in the dtype of `q`.
    """
    documents = documents if config.mask.by_document else None
    return _Attention(config, route).differentiable()(q, k, v, documents, sinks)


class _Part(NamedTuple):
    """Attention over some of the keys: `out[… seq heads head_dim]` and `lse[… seq heads]`, float32."""

    out: Array
    lse: Array


class _Keys(NamedTuple):
    """What travels, `2 batch chunk …`: a low and a high chunk of some device each."""

    k: Array
    v: Array
    documents: Array | None


class _Rows(NamedTuple):
    """What the backward needs of each query, `2 batch chunk …`: see `attention_gradients`."""

    q: Array
    documents: Array | None
    dout: Array
    lse: Array
    total: Array
    out: Array


@dataclass(frozen=True)
class _Attention:
    config: AttentionConfig
    route: Route

    def differentiable(self) -> Callable[..., Array]:
        @jax.custom_vjp
        def attend(q, k, v, documents, sinks):
            return self.forward(q, k, v, documents, sinks).out

        def forward(q, k, v, documents, sinks):
            out, lse = (checkpoint_name(x, NAME) for x in self.forward(q, k, v, documents, sinks))
            return out, (q, k, v, documents, sinks, out, lse)

        def backward(residuals, dout):
            q, k, v, documents, sinks, out, lse = residuals
            total = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
            dq, dk, dv = self.backward(q, k, v, documents, (dout, lse, total, out))
            dsinks = None
            if sinks is not None:
                dsinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32) - lse) * total, axis=(0, 1)).astype(sinks.dtype)
            return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, dsinks

        attend.defvjp(forward, backward)
        return attend

    # ---- forward --------------------------------------------------------------------------------------------------

    def forward(self, q: Array, k: Array, v: Array, documents: Array | None, sinks: Array | None) -> _Part:
        keys, queries, of_queries = _Keys(_chunks(k), _chunks(v), _chunks(documents)), _chunks(q), _chunks(documents)
        total = self._own(q, k, v, documents)

        def step(carry: Any, number: Any, problem: Problem, last: bool) -> Any:
            keys, total = carry
            following = keys if last else self.route.advance(keys)
            pairs = self.route.pairs(problem, number)
            return following, _merged(total, pairs, self._products(problem, pairs, queries, of_queries, keys))

        if self.route.steps:
            _, total = self._over_steps(step, (self.route.advance(keys), total), first=1)
        return _with_sinks(_Part(_whole(total.out), _whole(total.lse)), sinks, q.dtype)

    def _own(self, q: Array, k: Array, v: Array, documents: Array | None) -> _Part:
        """A device's queries over its own keys."""
        q, k, v = (self._by_chunk(x) for x in (q, k, v))
        out, lse = attention_part(q, k, v, self.config, self._own_inputs(documents))
        return _Part(*(self._as_chunks(x).astype(jnp.float32) for x in (out, lse)))

    def _products(
        self, problem: Problem, pairs: Sequence[Pair], q: Array, documents: Array | None, keys: _Keys
    ) -> list[_Part]:
        """Of each pair, computed as sequences of one batch."""
        q = _chosen(q, [p.queries for p in pairs])
        k, v = (_chosen(x, [p.keys for p in pairs]) for x in (keys.k, keys.v))
        inputs = self._inputs(problem, pairs, documents, keys.documents)
        out, lse = attention_part(q, k, v, self._config(problem), inputs)
        parts = zip(_split(out, len(pairs)), _split(lse, len(pairs)), strict=True)
        return [_Part(out, lse) for out, lse in parts]

    # ---- backward -------------------------------------------------------------------------------------------------

    def backward(
        self, q: Array, k: Array, v: Array, documents: Array | None, rows: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Of dO, the log-sum-exp, D and the output of each query; float32."""
        own = self._own_gradients(q, k, v, documents, rows)
        if not self.route.steps:
            return own
        keys = _Keys(_chunks(k), _chunks(v), _chunks(documents))
        queries = _Rows(_chunks(q), keys.documents, *(_chunks(x) for x in rows))

        def step(carry: Any, number: Any, problem: Problem, last: bool) -> Any:
            keys, of_keys, of_queries = carry
            following = keys if last else self.route.advance(keys)
            arriving = None if of_keys is None else self.route.advance(of_keys)
            pairs = self.route.pairs(problem, number)
            dq, *of_pairs = self._gradients(problem, pairs, queries, keys)
            found = tuple(_added(x, [p.keys for p in pairs]) for x in of_pairs)
            of_keys = found if arriving is None else jax.tree.map(jnp.add, arriving, found)
            return following, of_keys, of_queries + _added(dq, [p.queries for p in pairs])

        carry = self.route.advance(keys), None, jnp.zeros(queries.q.shape, jnp.float32)
        carry = step(carry, 1, self.route.problem(1), self.route.steps == 1)  # in which no gradients arrive yet
        _, of_keys, of_queries = carry if self.route.steps == 1 else self._over_steps(step, carry, first=2)
        dk, dv = self.route.home(of_keys)
        return own[0] + _whole(of_queries), own[1] + _whole(dk), own[2] + _whole(dv)

    def _own_gradients(
        self, q: Array, k: Array, v: Array, documents: Array | None, rows: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        q, k, v, dout, lse, total, out = (self._by_chunk(x) for x in (q, k, v, *rows))
        found = attention_gradients(q, k, v, self.config, self._own_inputs(documents), (dout, lse, total), out)
        dq, dk, dv = (_whole(self._as_chunks(x)).astype(jnp.float32) for x in found)
        return dq, dk, dv

    def _gradients(
        self, problem: Problem, pairs: Sequence[Pair], queries: _Rows, keys: _Keys
    ) -> tuple[list[Array], ...]:
        """Of queries, keys and values of each pair, float32."""
        q, dout, lse, total, out = (
            _chosen(x, [p.queries for p in pairs])
            for x in (queries.q, queries.dout, queries.lse, queries.total, queries.out)
        )
        valid = jnp.repeat(jnp.stack([jnp.asarray(p.valid) for p in pairs]), q.shape[0] // len(pairs))
        lse = jnp.where(valid[:, None, None], lse, jnp.inf)
        k, v = (_chosen(x, [p.keys for p in pairs]) for x in (keys.k, keys.v))
        inputs = self._inputs(problem, pairs, queries.documents, keys.documents)
        found = attention_gradients(q, k, v, self._config(problem), inputs, (dout, lse, total), out)
        return tuple(_split(x.astype(jnp.float32), len(pairs)) for x in found)

    # ---- both -----------------------------------------------------------------------------------------------------

    def _over_steps(self, step: Callable[..., Any], carry: Any, first: int) -> Any:
        """The steps of the route from `first` on, the last written out, as less is sent in it.

        The others are loops, in which the TPU compiler starts what is sent before the kernel: of steps that are written
        out, after it.
        """
        route = self.route
        for problem, numbers in in_order(route, first):
            body = lambda carry, number, problem=problem: (step(carry, number, problem, False), None)  # noqa: E731
            carry, _ = lax.scan(body, carry, jnp.arange(numbers.start, numbers.stop))
        return step(carry, route.steps, route.problem(route.steps), True)

    def _config(self, problem: Problem) -> AttentionConfig:
        return replace(self.config, mask=problem.mask)

    def _inputs(
        self, problem: Problem, pairs: Sequence[Pair], of_queries: Array | None, of_keys: Array | None
    ) -> AttentionInputs:
        if of_queries is None or of_keys is None:
            return AttentionInputs(None, problem.start)
        documents = _chosen(of_queries, [p.queries for p in pairs]), _chosen(of_keys, [p.keys for p in pairs])
        return AttentionInputs(documents, problem.start)

    def _own_inputs(self, documents: Array | None) -> AttentionInputs:
        if documents is None:
            return AttentionInputs()
        documents = self._by_chunk(documents)
        return AttentionInputs((documents, documents))

    def _by_chunk(self, x: Array) -> Array:
        """`batch seq …` → with a device's chunks as sequences of their own where neither sees the other."""
        if not self.route.by_chunk:
            return x
        chunks = _chunks(x)
        return chunks.reshape(-1, *chunks.shape[2:])

    def _as_chunks(self, x: Array) -> Array:
        """What `_by_chunk` gives → `2 batch chunk …`."""
        return x.reshape(2, -1, *x.shape[1:]) if self.route.by_chunk else _chunks(x)


def _merged(total: _Part, pairs: Sequence[Pair], parts: Sequence[_Part]) -> _Part:
    """`total[2 batch chunk …]` and a part for each pair, merged by their log-sum-exps."""
    results = []
    for chunk in (LOW, HIGH):
        outs, lses = [total.out[chunk]], [total.lse[chunk]]
        for pair, part in zip(pairs, parts, strict=True):
            if isinstance(pair.queries, int) and pair.queries != chunk:
                continue
            counts = jnp.logical_and(pair.queries == chunk, pair.valid)
            outs.append(part.out.astype(jnp.float32))
            lses.append(jnp.where(counts, part.lse, -jnp.inf))
        lse = _log_sum_exp(lses)
        finite = jnp.where(lse == -jnp.inf, 0, lse)
        weighted = [jnp.exp(one - finite)[..., None] * out for one, out in zip(lses, outs, strict=True)]
        results.append(_Part(sum(weighted[1:], weighted[0]), lse))
    return _Part(*(jnp.stack(both) for both in zip(*results, strict=True)))


def _log_sum_exp(lses: Sequence[Array]) -> Array:
    return jax.nn.logsumexp(jnp.stack(lses), axis=0)


def _with_sinks(part: _Part, sinks: Array | None, dtype: Any) -> _Part:
    """The whole attention: a sink is one more term of the sum, without a value. The output in `dtype`."""
    if sinks is None:
        return _Part(part.out.astype(dtype), part.lse)
    lse = jnp.logaddexp(part.lse, sinks.astype(jnp.float32))
    return _Part((part.out * jnp.exp(part.lse - lse)[..., None]).astype(dtype), lse)


def _chunks(x: Any) -> Any:
    """`batch seq …` → `2 batch chunk …`; None stays."""
    if x is None:
        return None
    return jnp.swapaxes(x.reshape(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]), 0, 1)


def _whole(x: Array) -> Array:
    """The inverse of `_chunks`."""
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _chosen(x: Array, chunks: Sequence[Any]) -> Array:
    """`2 batch chunk …` → these chunks, one after the other along `batch`."""
    return jnp.concatenate(
        [x[c] if isinstance(c, int) else lax.dynamic_index_in_dim(x, c, keepdims=False) for c in chunks]
    )


def _split(x: Array, count: int) -> list[Array]:
    """What `_chosen` puts one after the other."""
    return [lax.squeeze(part, (0,)) for part in jnp.split(x.reshape(count, -1, *x.shape[1:]), count)]


def _added(parts: Sequence[Array], chunks: Sequence[Any]) -> Array:
    """`2 batch chunk …`, each part added to its chunk."""

    def of(chunk: int) -> Array:
        fitting = [
            (part, own) for part, own in zip(parts, chunks, strict=True) if not isinstance(own, int) or own == chunk
        ]
        found = [part if isinstance(own, int) else jnp.where(own == chunk, part, 0) for part, own in fitting]
        return sum(found[1:], found[0]) if found else jnp.zeros_like(parts[0])

    return jnp.stack([of(LOW), of(HIGH)])
