"""Divergence of a linear head's distributions from a teacher's, in blocks of tokens, with its gradients.

Of each token, with p = softmax(teacher's logits / T) and q = softmax(logits / T), it is KL(p‖q) = Σ p·(log p − log q)
(Hinton et al., arXiv:1503.02531, without the factor T²), or, reversed, KL(q‖p) (Gu et al., arXiv:2306.08543), or the
generalised Jensen–Shannon divergence β·KL(p‖m) + (1 − β)·KL(q‖m), m = β·p + (1 − β)·q (Agarwal et al.,
arXiv:2306.13649, equation 1). As of `token_nll` the logits live for one block of tokens at a time, and the backward
makes them again.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.cross_entropy.blocks import cut, join
from axon.kernels.cross_entropy.columns import Columns
from axon.kernels.cross_entropy.products import add_gradients


@dataclass(frozen=True)
class Divergence:
    """Which divergence: `temperature` divides both models' logits; `beta` in (0, 1) is β of Jensen–Shannon.

    0 and 1 are KL(p‖q) and KL(q‖p), as in TRL's `generalized_jsd_loss`: limits of that divided by β, or by 1 − β.
    """

    temperature: float = 1.0
    beta: float = 0.0

    def terms(self, log_q: Array, log_p: Array) -> tuple[Array, Array]:
        """Of each id its term of the divergence, and q times the divergence's derivative for q, less a constant."""
        if self.beta == 0:
            p = jnp.exp(log_p)
            return p * (log_p - log_q), -p
        if self.beta == 1:
            term = jnp.exp(log_q) * (log_q - log_p)
            return term, term
        log_m = jnp.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        own = (1 - self.beta) * jnp.exp(log_q) * (log_q - log_m)
        return self.beta * jnp.exp(log_p) * (log_p - log_m) + own, own


class Side(NamedTuple):
    """One of the two models: its `x[tokens embed]`, its `head[embed vocab]`, and how they become logits."""

    x: Array
    head: Array
    columns: Columns


class Found(NamedTuple):
    """The divergence of each token in nats, the sum of the second of its `Divergence.terms`, and the log-partitions of
    both models' logits / T, float32."""

    divergence: Array
    slope: Array
    lse: Array
    teacher_lse: Array


def token_divergence(student: Side, teacher: Side, kind: Divergence) -> Found:
    """The divergence of each token; the columns of both heads are of the same ids, on the same devices."""

    def each(_, part):
        z, t = (_scaled(side._replace(x=x), kind) for side, x in zip((student, teacher), part, strict=True))
        lse, teacher_lse = (_log_partition(logits, student.columns) for logits in (z, t))
        log_q, log_p = z - lse[:, None], t - teacher_lse[:, None]
        total, slope = (student.columns.over(lax.psum, jnp.sum(one, axis=1)) for one in kind.terms(log_q, log_p))
        return None, Found(total, slope, lse, teacher_lse)

    found = lax.scan(each, None, cut(student.head.shape[1], student.x, teacher.x))[1]
    return Found(*(join(value, student.x.shape[0]) for value in found))


def token_divergence_gradients(
    student: Side, teacher: Side, kind: Divergence, found: Found, cotangent: Array, accumulate: Any = jnp.float32
) -> tuple[Array, Array]:
    """The gradients for the student's `x` and `head` of a function of the divergences, as `token_nll_gradients` makes
    them; `cotangent[tokens]`: the function's gradient for them."""
    columns = student.columns
    of_x = columns.partial_dtype(student.x.dtype, accumulate)

    def add(dhead, part):
        x, teacher_x, _, slope, lse, teacher_lse, cotangent = part
        logits = columns.logits(x, student.head)
        log_q = _tempered(logits, student, kind) - lse[:, None]
        log_p = _scaled(teacher._replace(x=teacher_x), kind) - teacher_lse[:, None]
        found = kind.terms(log_q, log_p)[1] - jnp.exp(log_q) * slope[:, None]
        dlogits = columns.slope(logits, found * (cotangent / kind.temperature)[:, None])
        return add_gradients(dhead, x, student.head, dlogits, of_x)

    parts = cut(student.head.shape[1], student.x, teacher.x, *found, cotangent)
    dhead, dx = lax.scan(add, jnp.zeros(student.head.shape, accumulate), parts)
    return join(dx, student.x.shape[0]), dhead


def token_divergence_reference(student: Side, teacher: Side, kind: Divergence) -> Array:
    """The divergence of each token by its formula, of heads that have all columns."""

    def log_probabilities(side: Side) -> Array:
        logits = (side.x @ side.head)[:, : side.columns.vocab].astype(jnp.promote_types(side.x.dtype, jnp.float32))
        if (cap := side.columns.soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / kind.temperature, axis=-1)

    log_q, log_p = log_probabilities(student), log_probabilities(teacher)
    return jnp.sum(kind.terms(log_q, log_p)[0], axis=-1)


def _scaled(side: Side, kind: Divergence) -> Array:
    return _tempered(side.columns.logits(side.x, side.head), side, kind)


def _tempered(logits: Array, side: Side, kind: Divergence) -> Array:
    """`logits / T`, and the least number still where a column stands for no id: divided by T < 1 it would be −∞."""
    if side.columns.vocab is None:
        return logits / kind.temperature
    real = side.columns.ids(side.head) < side.columns.vocab
    return jnp.where(real, logits / kind.temperature, jnp.finfo(jnp.float32).min)


def _log_partition(logits: Array, columns: Columns) -> Array:
    top = columns.over(lax.pmax, jnp.max(logits, axis=1))
    return top + jnp.log(columns.over(lax.psum, jnp.sum(jnp.exp(logits - top[:, None]), axis=1)))
