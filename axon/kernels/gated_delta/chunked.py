"""The gated delta rule over chunks of tokens: within a chunk products of matrices, from chunk to chunk the state."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

CHUNK = 64
"""Tokens of a chunk."""


@jax.default_matmul_precision("highest")
def gated_delta(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, documents: Array) -> Array:
    """The outputs of the gated delta rule, whose state is 0 before each document, float32.

    In a chunk the corrections of all tokens, u, solve the triangular system (I + L)·u = β·(v − e^c·k·S), where L_ij =
    β_i·(k_i·k_j)·e^(c_i − c_j) for j < i, c is the sum of log_decay from the chunk's beginning, and S the state there
    (the UT transform, arXiv:2406.06484, with the decay of arXiv:2412.06464).

    Args:
        q, k: `batch seq heads key_dim`. v: `batch seq heads per_head value_dim`. log_decay, beta: `batch seq heads
            per_head`. documents: `batch seq` int32, each number in one run.

    Returns: `batch seq heads per_head value_dim`.
    """
    state = jnp.zeros((k.shape[-1], v.shape[-1]), jnp.float32)
    return _over_chunks(state, documents[:, 0], (q, k, v, log_decay, beta), documents)[0]


@jax.default_matmul_precision("highest")
def gated_delta_run(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, documents: Array, last: Array
) -> tuple[Array, Array, Array, Array]:
    """The gated delta rule over a run of a sequence's positions, before the state S is known that it begins with.

    The rule is linear in S: beside the state that was 0 before, the identity follows the tokens in columns of its own,
    whose values are 0.

    Args: as of `gated_delta`; last: `batch` int32, the document that S is of.

    Returns: `out[batch seq heads per_head value_dim]` and `read[batch seq heads per_head key_dim]`: the outputs are
    out + read·S. `transition[batch heads per_head key_dim key_dim]` and `added[batch heads per_head key_dim
    value_dim]`: the state after the run is transition·S + added.
    """
    width, key_dim = v.shape[-1], k.shape[-1]
    state = jnp.concatenate([jnp.zeros((key_dim, width)), jnp.eye(key_dim)], axis=-1)
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, key_dim)])
    out, state = _over_chunks(state, last, (q, k, v, log_decay, beta), documents)
    return out[..., :width], out[..., width:], state[..., width:], state[..., :width]


def _over_chunks(state: Array, last: Array, operands: Sequence[Array], documents: Array) -> tuple[Array, Array]:
    """The outputs, and the state of each head after them; all begin with `state[key_dim value_dim]`, which is of the
    documents `last[batch]`."""
    seq = documents.shape[1]
    missing = -seq % CHUNK
    padded = (jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) for x in operands)
    parts = [_in_chunks(x.astype(jnp.float32)) for x in padded]
    parts.append(_in_chunks(jnp.pad(documents, ((0, 0), (0, missing)), mode="edge")))
    _, batch, _, heads, per_head, _ = parts[2].shape

    @jax.checkpoint
    def one(carry: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        return _chunk(*carry, *part)

    begun = jnp.broadcast_to(state, (batch, heads, per_head, *state.shape)), last
    (state, _), out = lax.scan(one, begun, tuple(parts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, seq + missing, *out.shape[3:])[:, :seq], state


def _in_chunks(x: Array) -> Array:
    """`batch seq …` as `chunks batch chunk …`."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0)


def _chunk(
    state: Array, last: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, documents: Array
) -> tuple[tuple[Array, Array], Array]:
    """The state after a chunk and its last document, and the outputs; `last`: the document that `state` is of."""
    steps = jnp.moveaxis(log_decay, 1, -1)  # batch heads per_head chunk
    decay, place = jnp.cumsum(steps, axis=-1), jnp.arange(q.shape[1])
    after = place[:, None] > place
    # Summed for each pair, not as a difference of two sums, of which nothing might be left but their rounding.
    between = jnp.cumsum(jnp.where(after, steps[..., :, None], 0), axis=-2)
    same = (documents[:, :, None] == documents[:, None, :])[:, None, None]
    fade = jnp.where(same & (place[:, None] >= place), jnp.exp(between), 0)
    gain = jnp.moveaxis(beta, 1, -1)
    system = gain[..., None] * jnp.einsum("bihk,bjhk->bhij", k, k)[:, :, None] * fade
    from_before = jnp.exp(decay) * (documents == last[:, None])[:, None, None]
    known = jnp.einsum("bihk,bhrkv->bhriv", k, state) * from_before[..., None]
    wanted = gain[..., None] * (jnp.moveaxis(v, 1, 3) - known)
    news = solve_triangular(jnp.where(after, system, 0), wanted, lower=True, unit_diagonal=True)
    read = jnp.einsum("bihk,bjhk->bhij", q, k)[:, :, None] * fade
    out = jnp.einsum("bhrij,bhrjv->bihrv", read, news)
    out = out + jnp.einsum("bihk,bhrkv,bhri->bihrv", q, state, from_before)
    to_end, end = fade[..., -1, :], from_before[..., -1]
    state = state * end[..., None, None] + jnp.einsum("bjhk,bhrjv,bhrj->bhrkv", k, news, to_end)
    return (state, documents[:, -1]), out
