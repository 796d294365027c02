"""Cross-entropy in blocks of tokens: each block's logits live only while its loss or its gradients are computed.

Two forms. `cross_entropy` sums over tokens, and makes its gradients in the same pass: nothing is recomputed, and the
work is that of the naive form, three products of `tokens × embed × vocab`. (The idea is that of Liger kernels, Hsu et
al., arXiv:2410.10989.) `token_nll` has a result for each token, whose gradients a cotangent must be known for: its
backward makes the logits anew, a fourth product.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.cross_entropy.blocks import cut, join
from axon.kernels.cross_entropy.columns import Columns, block, block_again, dlogits
from axon.kernels.cross_entropy.products import add_gradients, begun_gradient


class Sums(NamedTuple):
    """Over tokens, in nats: what is differentiated, `Σ weight·(nll + z_loss·lse²)`, and `Σ weight·nll`."""

    objective: Array
    nll: Array


def cross_entropy(
    x: Array, head: Array, targets: Array, weights: Array, z_loss: float = 0.0, columns: Columns = Columns()
) -> Sums:
    """The loss of one device's tokens under its columns of the head.

    Args:
        x: `tokens embed`; head: `embed vocab`; targets: `tokens`, ids; weights: `tokens`.
        z_loss: weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5).
        columns: how products with the head become logits.
    """

    def add(sums, part):
        x, targets, weights = part
        _, nll, lse = block(x, head, targets, columns)
        return _add(sums, nll, lse, weights, z_loss), None

    return lax.scan(add, _zero(), cut(head.shape[1], x, targets, weights))[0]


def cross_entropy_and_gradients(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    z_loss: float = 0.0,
    columns: Columns = Columns(),
    accumulate: Any = jnp.float32,
    trained: bool = True,
) -> tuple[Sums, Array, Array | None]:
    """As `cross_entropy`, with the objective's gradients for `x` and, summed in `accumulate`, for `head`, None where it
    is not `trained`.

    With a split vocabulary that for `x` is unreduced over its mesh axes, and in `accumulate` too: the caller sums it,
    and rounds the sum, not what is summed.
    """
    of_x = columns.partial_dtype(x.dtype, accumulate)

    def add(carry, part):
        sums, dhead = carry
        x, targets, weights = part
        current, nll, lse = block(x, head, targets, columns)
        rate = weights * (1 + 2 * z_loss * lse)
        dhead, dx = add_gradients(dhead, x, head, dlogits(current, weights, rate, columns), of_x)
        return (_add(sums, nll, lse, weights, z_loss), dhead), dx

    begin = (_zero(), begun_gradient(head, accumulate, trained))
    (sums, dhead), dx = lax.scan(add, begin, cut(head.shape[1], x, targets, weights))
    return sums, join(dx, x.shape[0]), dhead


def token_nll(x: Array, head: Array, targets: Array, columns: Columns = Columns()) -> tuple[Array, Array]:
    """Of each token, `(nll, lse)` in nats: `nll = lse − logit of the target`. Arguments as of `cross_entropy`."""

    def each(_, part):
        x, targets = part
        return None, block(x, head, targets, columns)[1:]

    nll, lse = lax.scan(each, None, cut(head.shape[1], x, targets))[1]
    return join(nll, x.shape[0]), join(lse, x.shape[0])


def token_nll_gradients(
    x: Array,
    head: Array,
    targets: Array,
    lse: Array,
    of_nll: Array,
    of_lse: Array,
    columns: Columns = Columns(),
    accumulate: Any = jnp.float32,
    trained: bool = True,
) -> tuple[Array, Array | None]:
    """The gradients for `x` and `head` of a function of `token_nll`, as `cross_entropy_and_gradients` makes them.

    Args:
        lse: `tokens`, as `token_nll` gave them; of_nll, of_lse: `tokens`, the function's gradients for its results.
    """
    of_x = columns.partial_dtype(x.dtype, accumulate)

    def add(dhead, part):
        x, targets, lse, of_nll, of_lse = part
        current = block_again(x, head, targets, lse, columns)
        return add_gradients(dhead, x, head, dlogits(current, of_nll, of_nll + of_lse, columns), of_x)

    parts = cut(head.shape[1], x, targets, lse, of_nll, of_lse)
    dhead, dx = lax.scan(add, begun_gradient(head, accumulate, trained), parts)
    return join(dx, x.shape[0]), dhead


def _zero() -> Sums:
    zero = jnp.zeros((), jnp.float32)
    return Sums(zero, zero)


def _add(sums: Sums, nll: Array, lse: Array, weights: Array, z_loss: float) -> Sums:
    nll = jnp.sum(weights * nll)
    penalty = z_loss * jnp.sum(weights * lse**2)
    return Sums(sums.objective + (nll + penalty), sums.nll + nll)
