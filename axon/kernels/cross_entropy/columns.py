"""One block of tokens against a device's columns of the head: logits, what is known of each token, and the slope."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import platform
from axon.axes.patterns import Names


@dataclass(frozen=True)
class Columns:
    """How products with a device's columns of the head become logits.

    Args:
        vocab: how many of the head's columns, on all devices, stand for ids; None for all. The others are never
            predicted.
        soft_cap: c of c·tanh(product / c) (Gemma 2, arXiv:2408.00118); None for none.
        mesh_axes: those that split the vocabulary, in a manual region; only maxima and sums over tokens travel.
    """

    vocab: int | None = None
    soft_cap: float | None = None
    mesh_axes: Names = ()

    def first(self, head: Array) -> Array | int:
        """The id of this device's first column."""
        return lax.axis_index(self.mesh_axes) * head.shape[1] if self.mesh_axes else 0

    def ids(self, head: Array) -> Array:
        """`1 vocab`, the id of each column."""
        return self.first(head) + lax.broadcasted_iota(jnp.int32, (1, head.shape[1]), 1)

    def logits(self, x: Array, head: Array) -> Array:
        """`tokens vocab`, float32 at least, the least number where a column stands for no id."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = lax.dot_general(x, head, (((1,), (0,)), ((), ())), preferred_element_type=wide)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.vocab is None:
            return logits
        return jnp.where(self.ids(head) < self.vocab, logits, jnp.finfo(jnp.float32).min)

    def slope(self, logits: Array, dlogits: Array) -> Array:
        """`dlogits`, gradients for `logits`, times the slope of the soft cap: gradients for the products."""
        if self.soft_cap is None:
            return dlogits
        bent = jnp.clip(logits / self.soft_cap, -1, 1)  # columns without an id are beyond: their slope is 0
        return dlogits * (1 - bent * bent)

    def partial_dtype(self, whole: Any, accumulate: Any) -> Any:
        """The dtype of a sum over these columns alone: `whole` where they are all there are."""
        return accumulate if self.mesh_axes else whole

    def over(self, collective: Callable[..., Array], value: Array) -> Array:
        """`collective` over the devices that have the other columns."""
        return collective(value, self.mesh_axes) if self.mesh_axes else value


class Block(NamedTuple):
    """A block's residuals for its gradients. `hit`: whether a column is the token's target."""

    logits: Array  # tokens vocab
    hit: Array  # tokens vocab
    probabilities: Array  # tokens vocab


def block(x: Array, head: Array, targets: Array, columns: Columns) -> tuple[Block, Array, Array]:
    """A block of `x[tokens embed]` against `head[embed vocab]`, and of each token `nll` and `lse`, float32."""
    logits = columns.logits(x, head)
    hit = columns.ids(head) == targets[:, None]
    logits, label = _label(logits, hit, targets - columns.first(head))
    label = columns.over(lax.psum, label)
    top = columns.over(lax.pmax, jnp.max(logits, axis=1, keepdims=True))
    powers = jnp.exp(logits - top)
    total = columns.over(lax.psum, jnp.sum(powers, axis=1, keepdims=True))
    lse = (top + jnp.log(total))[:, 0]
    return Block(logits, hit, powers / total), lse - label, lse


def block_again(x: Array, head: Array, targets: Array, lse: Array, columns: Columns) -> Block:
    """The same block where `lse` is known: without a maximum or a sum, so that nothing travels."""
    logits = columns.logits(x, head)
    return Block(logits, columns.ids(head) == targets[:, None], jnp.exp(logits - lse[:, None]))


def dlogits(block: Block, of_nll: Array, of_probabilities: Array, columns: Columns) -> Array:
    """`tokens vocab`, the gradients for `x·head` of a function of the tokens' `nll` and `lse`.

    Args:
        of_nll: `tokens`, the function's gradient for `nll`; of_probabilities: that plus its gradient for `lse`, as
            `nll` is `lse` minus the target's logit, and the gradient of `lse` for the logits is their probabilities.
    """
    found = of_probabilities[:, None] * block.probabilities - jnp.where(block.hit, of_nll[:, None], 0)
    return columns.slope(block.logits, found)


def _label(logits: Array, hit: Array, place: Array) -> tuple[Array, Array]:
    """The logits, and each token's at its target: 0 where that is not among these columns.

    The sum over `hit` is one more term of a pass over the logits that a TPU does anyway. A CPU would write its summands
    to memory first, so there the logit is read at its index; without the barrier XLA could read it after the
    exponentials are computed, and would keep both arrays instead of overwriting the logits.
    """
    if platform() != "cpu":
        return logits, jnp.sum(jnp.where(hit, logits, 0), axis=1)
    inside = (place >= 0) & (place < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(inside, place, 0)[:, None], axis=1)[:, 0]
    return lax.optimization_barrier((logits, jnp.where(inside, picked, 0)))
