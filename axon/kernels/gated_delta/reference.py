"""The gated delta rule, token by token."""

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.default_matmul_precision("highest")
def delta_step(state: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, Array]:
    """The state after a token, and its output; float32.

    Args:
        state: `… heads per_head key_dim value_dim`. q, k: `… heads key_dim`. v: `… heads per_head value_dim`.
        log_decay, beta: `… heads per_head`.
    """
    state = state * jnp.exp(log_decay)[..., None, None]
    known = jnp.einsum("...hk,...hrkv->...hrv", k, state)
    state = state + jnp.einsum("...hk,...hrv->...hrkv", k, beta[..., None] * (v - known))
    return state, jnp.einsum("...hk,...hrkv->...hrv", q, state)


def gated_delta_reference(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, documents: Array) -> Array:
    """`batch seq heads per_head value_dim`; see `axon.kernels.gated_delta.gated_delta`."""
    new = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        *operands, new = token
        return delta_step(jnp.where(new[:, None, None, None, None], 0, state), *operands)

    tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, log_decay, beta, new))
    shape = (*v.shape[:1], *v.shape[2:4], k.shape[-1], v.shape[-1])
    _, out = lax.scan(step, jnp.zeros(shape, jnp.float32), tokens)
    return jnp.swapaxes(out, 0, 1)
