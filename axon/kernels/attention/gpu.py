"""Flash attention on Hopper GPUs, forward and backward: our own kernels in Pallas Mosaic GPU (arXiv:2407.08608).

Tiles of keys that no query of a tile sees, by the mask's indices and the documents, are neither copied nor computed;
only tiles that are partly seen are masked. No GPU has run them yet: they run where they are requested by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.kernels.attention.gpu_backward import Rows, query_gradients
from axon.kernels.attention.gpu_backward_keys import block_keys, key_gradients
from axon.kernels.attention.gpu_block import CONSUMERS, ROWS
from axon.kernels.attention.gpu_forward import forward
from axon.kernels.attention.gpu_scores import LOG2E
from axon.kernels.attention.gpu_support import SIZES
from axon.kernels.attention.gpu_tiles import Meeting, Operands, meeting, table
from axon.kernels.attention.mask import Documents
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.tpu import NAME

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
    return _Kernels(config, interpret).differentiable()(q, k, v, AttentionInputs(inputs.documents, start))


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
    return _Kernels(config, interpret).backward(q, k, v, inputs, (rows[0].astype(q.dtype), *rows[1:]))


@dataclass(frozen=True)
class _Kernels:
    """All three kernels, of operands as in `attention`."""

    config: AttentionConfig
    interpret: Any

    def differentiable(self) -> Callable[..., tuple[Array, Array]]:
        """Output and log-sum-exp, `batch seq heads`."""

        @jax.custom_vjp
        def attend(q, k, v, inputs):
            return self.forward(q, k, v, inputs)

        def forward(q, k, v, inputs):
            out, lse = (checkpoint_name(x, NAME) for x in self.forward(q, k, v, inputs))
            return (out, lse), (q, k, v, inputs, out, lse)

        def backward(residuals, cotangents):
            q, k, v, inputs, out, lse = residuals
            dout, dlse = cotangents
            total = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1) - dlse
            none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), inputs)
            return *self.backward(q, k, v, inputs, (dout, lse, total)), none

        attend.defvjp(forward, backward)
        return attend

    def forward(self, q: Array, k: Array, v: Array, inputs: AttentionInputs) -> tuple[Array, Array]:
        operands, sizes = self._operands(q, k, v, inputs), SIZES[q.shape[3], v.shape[3]].forward
        met = meeting(self.config.mask, BLOCK, sizes.tile, k.shape[1], operands, inputs.start)
        tables = table(met, inputs.start)
        out, lse = forward(self.config, sizes, k.shape[1], tables, operands, self.interpret)
        return out[:, : q.shape[1]], lse.swapaxes(1, 2)[:, : q.shape[1]]

    def backward(
        self, q: Array, k: Array, v: Array, inputs: AttentionInputs, rows: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Of dO, the log-sum-exp and D of each query."""
        operands, mask, keys = self._operands(q, k, v, inputs), self.config.mask, k.shape[1]
        of_queries, of_keys = SIZES[q.shape[3], v.shape[3]][1:]
        of_rows = _rows(*rows)
        met = meeting(mask, BLOCK, of_queries.tile, keys, operands, inputs.start)
        tables = table(met, inputs.start)
        dq = query_gradients(self.config, of_queries, keys, tables, operands, of_rows, self.interpret)
        met = meeting(mask, of_keys.tile, block_keys(q.shape[3], v.shape[3]), keys, operands, inputs.start)
        tables = table(Meeting(*(x.swapaxes(1, 2) for x in met)), inputs.start)
        dk, dv = key_gradients(self.config, of_keys, keys, tables, operands, of_rows, self.interpret)
        return dq[:, : q.shape[1]], dk[:, :keys], dv[:, :keys]

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
