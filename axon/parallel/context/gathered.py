"""Attention of a device's positions over keys and values that were gathered from all others."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import Names
from axon.kernels.attention import AttentionConfig, AttentionInputs, attention_and_lse


def gathered_attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    axes: Names,
    stored: np.ndarray | None,
) -> Array:
    """Attention of `q[batch seq heads head_dim]`, a device's part, over `k, v[batch kv_seq kv_heads head_dim]`, all.

    In a region that is manual over the mesh `axes` that split the sequence. `stored`: the order in which `kv_seq` is
    stored, if zig-zag: each of a device's two chunks then has its own place among the keys. `inputs.start` is unused.
    """
    if not axes:
        return attention_and_lse(q, k, v, config, inputs)[0]
    device, seq = lax.axis_index(axes), q.shape[1]
    if stored is None:
        return attention_and_lse(q, k, v, config, inputs._replace(start=device * seq))[0]
    natural, chunk, chunks = np.argsort(stored), seq // 2, 2 * k.shape[1] // seq
    k, v, results = jnp.take(k, natural, axis=1), jnp.take(v, natural, axis=1), []
    for first, number in ((0, device), (chunk, chunks - 1 - device)):
        documents = inputs.documents and (
            inputs.documents[0][:, first : first + chunk],
            jnp.take(inputs.documents[1], natural, axis=1),
        )
        of_chunk = inputs._replace(documents=documents, start=number * chunk)
        results.append(attention_and_lse(q[:, first : first + chunk], k, v, config, of_chunk)[0])
    return jnp.concatenate(results, axis=1)
