"""A draw from the tokens that are kept, by the Gumbel-max trick.

The largest of `logit ÷ temperature + g`, with g from the standard Gumbel distribution, is a draw from the softmax
(Gumbel 1954; Maddison et al., arXiv:1411.0030): no normalisation and no cumulative sum.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.sampling.rules import GREEDY, Rules


def draw(logits: Array, least: Array, keys: Array, rules: Rules) -> Array:
    """An id for each request, of those in `logits[batch vocab]` that are at least `least[batch]`; `keys[batch]`."""

    def drawn():
        bits = jax.vmap(lambda key: jax.random.bits(key, logits.shape[1:], jnp.uint32))(keys)
        scaled = (logits - rules.top[:, None]) / rules.divisor[:, None]
        scores = jnp.where(logits >= least[:, None], scaled + gumbel(bits), -jnp.inf)
        return jnp.argmax(jnp.where(rules.temperature[:, None] < GREEDY, logits, scores), axis=1).astype(jnp.int32)

    def top():
        return jnp.argmax(logits, axis=1).astype(jnp.int32)

    return lax.cond(jnp.any(rules.temperature >= GREEDY), drawn, top)


def gumbel(bits: Array) -> Array:
    """A draw of the standard Gumbel distribution for 32 random bits, −log(−log(1 − u)) with u in (0, 1).

    The large values, which decide, are those of u near 0, where floats are close together: they reach 22.9.
    (`jax.random.gumbel` has u near 1, where 23 bits are left: it ends at 15.9, and of a large vocabulary the unlikely
    tokens are drawn too seldom.)
    """
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))
