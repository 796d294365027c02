"""Flash attention on Hopper GPUs, forward and backward: our own kernels in Pallas Mosaic GPU (arXiv:2407.08608).

Tiles of keys that no query of a tile sees, by the mask's indices and the documents, are neither copied nor computed;
only tiles that are partly seen are masked. They run where they are requested by name.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.kernels.attention.cost import pairs
from axon.kernels.attention.flash import differentiable
from axon.kernels.attention.gpu_backward import QueryGradients, Rows
from axon.kernels.attention.gpu_backward_keys import KeyGradients, block_keys
from axon.kernels.attention.gpu_forward import Forward
from axon.kernels.attention.gpu_support import SIZES
from axon.kernels.attention.gpu_tiles import Meeting, Operands, meeting, table
from axon.kernels.attention.mask import Documents
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.cost import Cost
from axon.kernels.warpgroups import CONSUMERS, ROWS
from axon.kernels.wgmma_softmax import LOG2E

BLOCK = ROWS * CONSUMERS
"""Lengths are padded to a multiple of it; every kernel's tiles divide it."""


def attention_gpu(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs = AttentionInputs(),
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`."""
    start = jnp.asarray(inputs.start, jnp.int32)
    kernels = _Kernels.of(config, inputs, interpret)
    attend = differentiable(kernels.forward, kernels.backward)
    return attend(q, k, v, AttentionInputs(inputs.documents, start))


def attention_gradients_gpu(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """See `axon.kernels.attention.attention_gradients`; in the dtype of the operands."""
    return _Kernels.of(config, inputs, interpret).backward(q, k, v, inputs, (rows[0].astype(q.dtype), *rows[1:]))


@dataclass(frozen=True)
class _Kernels:
    """All three kernels, of operands as in `attention`."""

    config: AttentionConfig
    start: int | None
    interpret: Any

    @classmethod
    def of(cls, config: AttentionConfig, inputs: AttentionInputs, interpret: Any) -> "_Kernels":
        """`start` where it is a constant."""
        return cls(config, inputs.constant_start, interpret)

    def forward(self, q: Array, k: Array, v: Array, inputs: AttentionInputs) -> tuple[Array, Array]:
        """Output and log-sum-exp, `batch seq heads`."""
        operands, sizes, keys = self._operands(q, k, v, inputs), SIZES[q.shape[3], v.shape[3]].forward, k.shape[1]
        met = meeting(self.config.mask, BLOCK, sizes.tile, keys, operands, inputs.start)
        kernel = Forward(self.config, sizes, keys, self._cost(q, k, v, 1, 1), self.interpret)
        out, lse = kernel.run(table(met, inputs.start), operands)
        return out[:, : q.shape[1]], lse.swapaxes(1, 2)[:, : q.shape[1]]

    def backward(
        self, q: Array, k: Array, v: Array, inputs: AttentionInputs, rows: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Of dO, the log-sum-exp and D of each query."""
        operands, mask, keys = self._operands(q, k, v, inputs), self.config.mask, k.shape[1]
        of_queries, of_keys = SIZES[q.shape[3], v.shape[3]][1:]
        block, of_rows = block_keys(q.shape[3], v.shape[3]), _rows(*rows)
        met = meeting(mask, BLOCK, of_queries.tile, keys, operands, inputs.start)
        kernel = QueryGradients(self.config, of_queries, keys, self._cost(q, k, v, 2, 1), self.interpret)
        dq = kernel.run(table(met, inputs.start), operands, of_rows)
        met = meeting(mask, of_keys.tile, block, keys, operands, inputs.start)
        met = Meeting(*(x.swapaxes(1, 2) for x in met))
        cost = self._cost(q, k, v, 2 if block == BLOCK else 3, 2)  # scores are computed by both, where each has one
        kernel = KeyGradients(self.config, of_keys, keys, cost, self.interpret, block)
        dk, dv = kernel.run(table(met, inputs.start), operands, of_rows)
        return dq[:, : q.shape[1]], dk[:, :keys], dv[:, :keys]

    def _cost(self, q: Array, k: Array, v: Array, of_keys: int, of_values: int) -> Cost:
        """Of so many products of head_dim and of value_dim for each pair that the indices allow.

        A start that is known only at run time counts as if the last query were the last key.
        """
        start = k.shape[1] - q.shape[1] if self.start is None else self.start
        seen = q.shape[0] * q.shape[2] * pairs(self.config.mask, q.shape[1], k.shape[1], start)
        moved = 2 * (q.size + k.size + v.size) * q.dtype.itemsize
        return Cost(2 * seen * (of_keys * q.shape[3] + of_values * v.shape[3]), moved)

    def _operands(self, q: Array, k: Array, v: Array, inputs: AttentionInputs) -> Operands:
        """Padded to whole tiles."""
        documents: Documents = None
        if self.config.mask.by_document and inputs.documents is not None:
            of_queries, of_keys = (_padded(x.astype(jnp.int32), 1) for x in inputs.documents)
            documents = (of_queries, of_keys)
        return Operands(_padded(q, 1), _padded(k, 1), _padded(v, 1), documents)


def _rows(dout: Array, lse: Array, total: Array) -> Rows:
    """Padded as the queries are, which then have no weights; the log-sum-exp in base 2."""
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E).swapaxes(1, 2)
    return Rows(_padded(dout, 1), _padded(lse, 2, jnp.inf), _padded(total.swapaxes(1, 2), 2))


def _padded(x: Array, axis: int, fill: float = 0) -> Array:
    missing = -x.shape[axis] % BLOCK
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return x if not missing else jnp.pad(x, widths, constant_values=fill)
