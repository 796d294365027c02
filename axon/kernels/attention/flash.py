"""Parts of the flash kernels of all platforms: residuals that have a name, and gradients of what is no operand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.kernels.attention.problem import AttentionInputs

NAME = "attention"
"""The `checkpoint_name` of the residuals for the backward: the output, and each query's log-sum-exp."""


def differentiable(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., tuple[Array, Array, Array]]
) -> Callable[..., tuple[Array, Array]]:
    """`attend(q, k, v, inputs)`: output and log-sum-exp, which may both be differentiated.

    Args:
        forward: of the same operands. The log-sum-exp has the output's axes in the output's order, less the last.
        backward: of them and (dO, the log-sum-exp, D = Σ O·dO − dlse) of each query: dq, dk, dv.
    """

    @jax.custom_vjp
    def attend(q, k, v, inputs):
        return forward(q, k, v, inputs)

    def with_residuals(q, k, v, inputs):
        out, lse = (checkpoint_name(x, NAME) for x in forward(q, k, v, inputs))
        return (out, lse), (q, k, v, inputs, out, lse)

    def gradients(residuals, cotangents):
        q, k, v, inputs, out, lse = residuals
        dout, dlse = cotangents
        total = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1) - dlse
        return *backward(q, k, v, inputs, (dout, lse, total)), input_gradients(inputs, lse, total)

    attend.defvjp(with_residuals, gradients)
    return attend


def input_gradients(inputs: AttentionInputs, lse: Array, total: Array) -> AttentionInputs:
    """The gradient of the sinks: a sink's power times −D, summed over queries. Others have none.

    Of each query the log-sum-exp and D, `batch heads seq`; `heads` may be several axes.
    """
    documents, start = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (inputs.documents, inputs.start))
    alibi_slopes = None if inputs.alibi_slopes is None else jnp.zeros_like(inputs.alibi_slopes)
    if inputs.sinks is None:
        return AttentionInputs(documents, start, None, alibi_slopes)
    powers = jnp.exp(inputs.sinks.astype(jnp.float32).reshape(1, *lse.shape[1:-1], 1) - lse)
    dsinks = -jnp.sum(powers * total, axis=(0, -1)).reshape(inputs.sinks.shape)
    return AttentionInputs(documents, start, dsinks.astype(inputs.sinks.dtype), alibi_slopes)
