"""The least logit that top-k and top-p keep, by a search for it: passes over the logits, no sort.

A sort of a vocabulary is some 150 passes of compare and exchange on a TPU, and slow on a CPU; here each search is 32
passes that only count or add up (8 on a GPU, of 15 sums each), none where no request asks for it.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import platform
from axon.kernels.sampling.rules import Rules
from axon.kernels.sampling.search import STEPS, search, search_digits


def least_kept_xla(logits: Array, rules: Rules) -> Array:
    """`batch`; see `axon.kernels.sampling.sample`. logits: `batch vocab`, float32."""

    def many(values):
        return [count >= rules.top_k[:, None] for count in _sums([(logits >= x).astype(jnp.int32) for x in values])]

    shape = (logits.shape[0], 1)
    kth = _found(many, shape, top_k_steps(logits, rules))
    powers = jnp.where(logits >= kth, rules.powers(logits), 0)
    wanted = rules.top_p[:, None] * jnp.sum(powers, axis=1, keepdims=True)

    def enough(values):
        return [mass >= wanted for mass in _sums([jnp.where(logits >= x, powers, 0) for x in values])]

    nucleus = _found(enough, shape, top_p_steps(rules))
    return jnp.where(rules.top_p[:, None] < 1, jnp.maximum(kth, nucleus), kth)[:, 0]


def _found(hold: Callable[[list[Array]], list[Array]], shape: tuple[int, int], steps: Array) -> Array:
    """The largest float that holds, −inf with 0 steps.

    On a GPU the number of steps is a constant: a loop whose end is computed has the host wait for each step's.
    """
    if platform() != "gpu":
        return search(lambda value: hold([value])[0], shape, steps)
    return lax.cond(steps > 0, lambda: search_digits(hold, shape), lambda: jnp.full(shape, -jnp.inf, jnp.float32))


def _sums(parts: list[Array]) -> list[Array]:
    """`batch 1` of each `batch vocab`; of several, in one pass over what they are computed from."""
    if len(parts) == 1:
        return [jnp.sum(parts[0], axis=1, keepdims=True)]
    zeros = tuple(jnp.zeros((), part.dtype) for part in parts)
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return [total[:, None] for total in lax.reduce(tuple(parts), zeros, add, (1,))]


def top_k_steps(logits: Array, rules: Rules) -> Array:
    """How many steps the search for top-k needs: none where no request has one."""
    return jnp.where(jnp.any(rules.top_k < logits.shape[1]), STEPS, 0)


def top_p_steps(rules: Rules) -> Array:
    """How many steps the search for top-p needs: none where no request has one."""
    return jnp.where(jnp.any(rules.top_p < 1), STEPS, 0)
