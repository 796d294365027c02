"""The cost of attention: pairs of a query and a key that it sees, and the bytes that have to move."""

import jax
import numpy as np

from axon.kernels.attention.mask import Mask
from axon.kernels.cost import Cost

Shaped = jax.Array | jax.ShapeDtypeStruct


def pairs(mask: Mask, queries: int, keys: int, start: int | None = 0) -> int:
    """Pairs that the indices allow; documents, which are known only at run time, reduce them.

    A `start` that is known only at run time is None: the mean over shards of as many queries, side by side from the
    first key on, which is exact for all devices together where `context` splits a sequence.
    """
    if start is None:
        shards = max(1, keys // queries)
        return pairs(mask, shards * queries, keys) // shards
    first = start + np.arange(queries)
    low, high = (np.broadcast_to(end, first.shape) for end in mask.keys(first, first + 1, keys))
    return int(np.sum(high - low))


def forward_cost(mask: Mask, q: Shaped, k: Shaped, v: Shaped, start: int | None = 0) -> Cost:
    """Two products a pair, of head_dim and of value_dim; q, k, v, the output and the log-sum-exp move once.

    Shapes: `q[batch kv_heads group seq head_dim]`, `k, v[batch kv_heads kv_seq head_dim]`.
    """
    heads = q.shape[0] * q.shape[1] * q.shape[2]
    seen = heads * pairs(mask, q.shape[3], k.shape[2], start)
    rows = heads * q.shape[3]
    moved = q.size + k.size + v.size + rows * v.shape[3]
    return Cost(2 * seen * (q.shape[4] + v.shape[3]), moved * q.dtype.itemsize + 4 * rows)


def backward_cost(mask: Mask, q: Shaped, k: Shaped, v: Shaped, start: int | None = 0) -> Cost:
    """Five products a pair, three of head_dim and two of value_dim; operands, dO and the three gradients move once."""
    heads = q.shape[0] * q.shape[1] * q.shape[2]
    seen = heads * pairs(mask, q.shape[3], k.shape[2], start)
    rows = heads * q.shape[3]
    moved = 2 * (q.size + k.size + v.size) + rows * v.shape[3]
    return Cost(2 * seen * (3 * q.shape[4] + 2 * v.shape[3]), moved * q.dtype.itemsize + 8 * rows)
