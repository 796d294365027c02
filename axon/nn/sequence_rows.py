"""Which sequences the new tokens of a pass belong to, for blocks that keep a state of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.axes.placing import current_explicit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceRows:
    """Where the new tokens of each sequence lie among all of a pass, `batch seq` in row-major order.

    The sequences are those along `batch` of a state in the cache: the rows themselves, or those of a step of the
    engine, which has the tokens of many in one row. Tokens that are no sequence's are padding, and change no state.

    Args:
        starts, counts: int32 `sequences`: the place of its first new token, and how many it has, perhaps none. The
            places do not decrease.
        begins: bool `sequences`: whether the first one is the sequence's own first token, before which its state is 0.
    """

    starts: Array
    counts: Array
    begins: Array

    def before(self, state: Any) -> Any:
        """The states before the new tokens, arrays `sequences …`: 0 of a sequence that begins."""
        return jax.tree.map(lambda x: jnp.where(_along(self.begins, x), jnp.zeros_like(x), x), state)

    def scan(self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, tokens: Any) -> tuple[Any, Any]:
        """A recurrence over the new tokens of every sequence, and the states after them.

        All sequences take a token at once: it takes as long as the most tokens that one of them has. The bits of a
        sequence's outputs and state depend neither on the others nor on how its tokens are divided into passes.

        Args:
            step: (state, token) → (state, output), of arrays with a leading axis `sequences`.
            state: arrays `sequences …`, as the cache has them. tokens: arrays `batch seq …`.

        Returns: the states, and the outputs, `batch seq …`: 0 of padding.
        """
        batch, seq = jax.tree.leaves(tokens)[0].shape[:2]
        flat = jax.tree.map(lambda x: x.reshape(batch * seq, *x.shape[2:]), tokens)
        state = self.before(state)

        def taken(i: Array | int) -> Any:
            return jax.tree.map(lambda x: x.at[self.starts + i].get(mode="clip"), flat)

        def turn(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state, outs = carry
            new, out = step(state, taken(i))
            there = i < self.counts
            place = jnp.where(there, self.starts + i, batch * seq)
            state = jax.tree.map(lambda new, x: jnp.where(_along(there, x), new.astype(x.dtype), x), new, state)
            return state, jax.tree.map(lambda all_, one: all_.at[place].set(one, mode="drop"), outs, out)

        of_one = jax.eval_shape(lambda state, token: step(state, token)[1], state, taken(0))
        outs = jax.tree.map(lambda x: _zeros(batch * seq, x), of_one)
        state, outs = lax.fori_loop(0, jnp.max(self.counts), turn, (state, outs))
        return state, jax.tree.map(lambda x: x.reshape(batch, seq, *x.shape[1:]), outs)

    def windows(self, x: Array, last: Array) -> tuple[Array, Array]:
        """Each token with the `n` before it in its sequence, the oldest first, as a convolution sees them; 0 before the
        first.

        Args:
            x: `batch seq …`. last: `sequences n …`, the state: the last n tokens before these.

        Returns: `batch seq n+1 …`, and the state after them.
        """
        (batch, seq), n = x.shape[:2], last.shape[1]
        flat, last = x.reshape(batch * seq, *x.shape[2:]), self.before(last)
        places = jnp.arange(batch * seq, dtype=jnp.int32)
        owner = jnp.searchsorted(self.starts, places, side="right") - 1

        def at(owner: Array, offset: Array) -> Array:
            """The tokens at these offsets from their sequences' first new ones."""
            new = flat.at[self.starts[owner] + offset].get(mode="clip")
            return jnp.where(_along(offset >= 0, new), new, last.at[owner, n + offset].get(mode="clip"))

        offsets = places - self.starts[owner]
        windows = jnp.stack([at(owner, offsets - k) for k in range(n, -1, -1)], axis=1)
        sequences = jnp.arange(len(self.counts), dtype=jnp.int32)
        after = jnp.stack([at(sequences, self.counts - k) for k in range(n, 0, -1)], axis=1)
        return windows.reshape(batch, seq, *windows.shape[1:]), after.astype(last.dtype)


def _zeros(rows: int, one: Any) -> Array:
    """So many rows in place of those of `one`, split as it is."""
    zeros = jnp.zeros((rows, *one.shape[1:]), one.dtype)
    return axes.reshard(zeros, one.sharding.spec) if current_explicit() else zeros


def _along(mask: Array, x: Array) -> Array:
    """`mask[first axis of x]`, to be broadcast with `x`."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
