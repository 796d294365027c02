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
from axon.kernels.cross_entropy.products import add_gradients, begun_gradient
from axon.kernels.cross_entropy.teachers import Side, Teacher, log_partition


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


class Found(NamedTuple):
    """The divergence of each token in nats, the sum of the second of its `Divergence.terms`, the log-partition of the
    model's logits / T, and what `Teacher.again` knows of the teacher's distribution, float32."""

    divergence: Array
    slope: Array
    lse: Array
    known: Array


def token_divergence(student: Side, teacher: Teacher, kind: Divergence) -> Found:
    """The divergence of each token; a teacher's head has columns of the same ids, on the same devices."""
    columns = student.columns

    def each(_, part):
        x, *block = part
        logits = student.scaled(x, kind.temperature)
        lse = log_partition(logits, columns)
        log_q = logits - lse[:, None]
        log_p, known = teacher.read(tuple(block), log_q, kind.temperature)
        total, slope = (columns.over(lax.psum, jnp.sum(one, axis=1)) for one in kind.terms(log_q, log_p))
        return None, Found(total, slope, lse, known)

    found = lax.scan(each, None, cut(student.head.shape[1], student.x, *teacher.by_token))[1]
    return Found(*(join(value, student.x.shape[0]) for value in found))


def token_divergence_gradients(
    student: Side,
    teacher: Teacher,
    kind: Divergence,
    found: Found,
    cotangent: Array,
    accumulate: Any = jnp.float32,
    trained: bool = True,
) -> tuple[Array, Array | None]:
    """The gradients for the student's `x` and `head` of a function of the divergences, as `token_nll_gradients` makes
    them; `cotangent[tokens]`: the function's gradient for them."""
    columns = student.columns
    of_x = columns.partial_dtype(student.x.dtype, accumulate)

    def add(dhead, part):
        x, slope, lse, known, cotangent, *block = part
        logits = columns.logits(x, student.head)
        log_q = student.tempered(logits, kind.temperature) - lse[:, None]
        log_p = teacher.again(tuple(block), known, log_q, kind.temperature)
        found = kind.terms(log_q, log_p)[1] - jnp.exp(log_q) * slope[:, None]
        dlogits = columns.slope(logits, found * (cotangent / kind.temperature)[:, None])
        return add_gradients(dhead, x, student.head, dlogits, of_x)

    parts = cut(student.head.shape[1], student.x, *found[1:], cotangent, *teacher.by_token)
    dhead, dx = lax.scan(add, begun_gradient(student.head, accumulate, trained), parts)
    return join(dx, student.x.shape[0]), dhead


def token_divergence_reference(student: Side, teacher: Teacher, kind: Divergence) -> Array:
    """The divergence of each token by its formula, of a head that has all columns."""
    logits = student.scaled(student.x, kind.temperature)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    log_p = lax.stop_gradient(teacher.read(teacher.by_token, log_q, kind.temperature)[0])
    return jnp.sum(kind.terms(log_q, log_p)[0], axis=-1)
