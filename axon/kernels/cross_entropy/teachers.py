"""Where a teacher's distributions come from, for one block of tokens: its head, or its most likely ids alone."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.cross_entropy.columns import Columns

REST = 2.0**-23
"""The least probability of a teacher's other ids, where its most likely ones are all but all: float32's precision."""

LEAST = jnp.finfo(jnp.float32).min
"""The logit of a column that stands for no id."""


class Side(NamedTuple):
    """One of two models: its `x[tokens embed]`, its `head[embed vocab]`, and how they become logits."""

    x: Array
    head: Array
    columns: Columns

    def tempered(self, logits: Array, temperature: float) -> Array:
        """`logits / T`, and the least number still where a column stands for no id: divided by T < 1 it would be −∞."""
        if self.columns.vocab is None:
            return logits / temperature
        return jnp.where(self.columns.ids(self.head) < self.columns.vocab, logits / temperature, LEAST)

    def scaled(self, x: Array, temperature: float) -> Array:
        """Logits / T of a block `x`, `tokens vocab` float32."""
        return self.tempered(self.columns.logits(x, self.head), temperature)


class Teacher(Protocol):
    """A teacher of tokens; `log_q[tokens vocab]`: the model's log-probabilities of a block, of a device's columns."""

    @property
    def by_token(self) -> tuple[Array, ...]:
        """Arrays `tokens …` of what is known of each token."""
        ...

    def read(self, block: tuple[Array, ...], log_q: Array, temperature: float) -> tuple[Array, Array]:
        """Log p of a block of `by_token`, `tokens vocab`, and the number of each token by which `again` knows it."""
        ...

    def again(self, block: tuple[Array, ...], known: Array, log_q: Array, temperature: float) -> Array:
        """The same log p, so that nothing travels."""
        ...


class HeadTeacher(NamedTuple):
    """A teacher's hidden states and head; of each token its log-partition is `known`."""

    side: Side

    @property
    def by_token(self) -> tuple[Array, ...]:
        return (self.side.x,)

    def read(self, block: tuple[Array, ...], log_q: Array, temperature: float) -> tuple[Array, Array]:
        logits = self.side.scaled(block[0], temperature)
        lse = log_partition(logits, self.side.columns)
        return logits - lse[:, None], lse

    def again(self, block: tuple[Array, ...], known: Array, log_q: Array, temperature: float) -> Array:
        return self.side.scaled(block[0], temperature) - known[:, None]


class TopTeacher(NamedTuple):
    """The most likely ids of a teacher, `ids[tokens top]`, and `logprobs[tokens top]` in nats of its logits, T = 1.

    All other ids are one outcome, of either distribution (the "ghost token" of Anshumann et al., arXiv:2503.16870):
    a divergence of such is at most that of the whole distributions, and equal where the ratio q / p of the others is
    one number. So p of each of them is q times that number, of which log is `known`, and the sums over ids are those of
    whole distributions, gradients too.
    """

    ids: Array
    logprobs: Array
    columns: Columns

    @property
    def by_token(self) -> tuple[Array, ...]:
        return self.ids, self.logprobs

    def read(self, block: tuple[Array, ...], log_q: Array, temperature: float) -> tuple[Array, Array]:
        ids, logprobs = block
        rest_of_q = jnp.exp(self._with(ids, jnp.full_like(logprobs, LEAST), log_q))
        total = self.columns.over(lax.psum, jnp.sum(rest_of_q, axis=1))
        rest = -jnp.expm1(jax.nn.logsumexp(logprobs, axis=1))
        known = jnp.log(jnp.maximum(rest, REST)) - jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny))
        return self.again(block, known, log_q, temperature), known

    def again(self, block: tuple[Array, ...], known: Array, log_q: Array, temperature: float) -> Array:
        ids, logprobs = block
        return self._with(ids, logprobs, log_q + known[:, None])

    def _with(self, ids: Array, values: Array, others: Array) -> Array:
        """`others[tokens vocab]`, with the `values` of these ids that are among a device's columns."""
        count = others.shape[1]
        place = ids - (lax.axis_index(self.columns.mesh_axes) * count if self.columns.mesh_axes else 0)
        place = jnp.where((place >= 0) & (place < count), place, count)
        return others.at[jnp.arange(len(ids))[:, None], place].set(values, mode="drop")


def log_partition(logits: Array, columns: Columns) -> Array:
    """log Σ exp(logits) of each token, over the columns of all devices."""
    top = columns.over(lax.pmax, jnp.max(logits, axis=1))
    return top + jnp.log(columns.over(lax.psum, jnp.sum(jnp.exp(logits - top[:, None]), axis=1)))
