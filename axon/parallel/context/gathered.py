"""Attention of a device's positions over keys and values that were gathered from all others."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import Names
from axon.kernels.attention import AttentionConfig, AttentionInputs, attention_and_lse
from axon.parallel.context.positions import Positions, permuted


def gathered_attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    axes: Names,
    stored: np.ndarray,
) -> Array:
    """Attention of `q[batch seq heads head_dim]`, a device's part, over `k, v[batch kv_seq kv_heads head_dim]`, all.

    In a region that is manual over the mesh `axes` that split the sequence. `stored`: the order in which positions are
    stored: each run of a device's positions has its own place among the keys. `inputs.start` is unused.
    """
    own, natural = Positions.of(stored, k.shape[1] // q.shape[1]), np.argsort(stored)
    q, (k, v) = permuted(q, own.order), (permuted(x, natural) for x in (k, v))
    of_queries, of_keys = inputs.documents or (None, None)
    of_queries, of_keys = permuted(of_queries, own.order), permuted(of_keys, natural)
    results = []
    for run in range(own.starts.shape[1]):
        places = slice(run * own.length, (run + 1) * own.length)
        documents = None if of_queries is None or of_keys is None else (of_queries[:, places], of_keys)
        start = jnp.asarray(own.starts[:, run], jnp.int32)[lax.axis_index(axes)] if axes else 0
        of_run = inputs._replace(documents=documents, start=start)
        results.append(attention_and_lse(q[:, places], k, v, config, of_run)[0])
    out = jnp.concatenate(results, axis=1) if len(results) > 1 else results[0]
    return permuted(out, np.argsort(own.order))
