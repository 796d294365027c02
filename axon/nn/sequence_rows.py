"""Which sequences the new tokens of a pass belong to, for blocks that keep a state of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        drafts, versions: int32 `sequences`, where the last tokens may be drafts, to be rejected later: how many are,
            and how many of the drafts before were accepted. Each sequence's state is then in the cache several times,
            after the tokens that are no drafts, after one draft, and so on; `versions` says which one counts.
    """

    starts: Array
    counts: Array
    begins: Array
    drafts: Array | None = None
    versions: Array | None = None

    def before(self, state: Any) -> Any:
        """The states before the new tokens, arrays `sequences …`: 0 of a sequence that begins."""

        def one(x: Array) -> Array:
            x = x.at[self._kept(x, 0 if self.versions is None else self.versions)].get() if self._keeps(x) > 1 else x
            return jnp.where(_along(self.begins, x), jnp.zeros_like(x), x)

        return jax.tree.map(one, state)

    def _keeps(self, x: Array) -> int:
        """How many states of each sequence an array has."""
        return x.shape[0] // len(self.counts)

    def _kept(self, x: Array, version: Array | int) -> Array:
        """Places of one version of each sequence's state; of one that is not kept, beyond the end."""
        keeps, sequences = self._keeps(x), jnp.arange(len(self.counts), dtype=jnp.int32)
        return jnp.where((version >= 0) & (version < keeps), keeps * sequences + version, len(x))

    def _version(self, token: Array | int) -> Array:
        """The version of a state after this one of the new tokens: how many drafts it has seen."""
        drafts = 0 if self.drafts is None else self.drafts
        return jnp.where(token < self.counts, token - (self.counts - drafts - 1), -1)

    def scan(self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, tokens: Any) -> tuple[Any, Any]:
        """A recurrence over the new tokens of every sequence, and the states after them.

        All sequences take a token at once: it takes as long as the most tokens that one of them has. The bits of a
        sequence's outputs and state depend neither on the others nor on how its tokens are divided into passes.

        Args:
            step: (state, token) → (state, output), of arrays with a leading axis `sequences`.
            state: arrays as the cache has them; none of what only reads a constant one. tokens: arrays `batch seq …`.

        Returns: the states, and the outputs, `batch seq …`: 0 of padding.
        """
        batch, seq = jax.tree.leaves(tokens)[0].shape[:2]
        flat = jax.tree.map(lambda x: x.reshape(batch * seq, *x.shape[2:]), tokens)
        cached, state = state, self.before(state)
        keeps = max(map(self._keeps, jax.tree.leaves(cached)), default=1)

        def taken(i: Array | int) -> Any:
            return jax.tree.map(lambda x: x.at[self.starts + i].get(mode="clip"), flat)

        def keep(i: Array, kept: Array, state: Array) -> Array:
            return kept.at[self._kept(kept, self._version(i))].set(state, mode="drop")

        def turn(i: Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            state, kept, outs = carry
            new, out = step(state, taken(i))
            there = i < self.counts
            place = jnp.where(there, self.starts + i, batch * seq)
            state = jax.tree.map(lambda new, x: jnp.where(_along(there, x), new.astype(x.dtype), x), new, state)
            kept = jax.tree.map(partial(keep, i), kept, state) if keeps > 1 else ()
            return state, kept, jax.tree.map(lambda all_, one: all_.at[place].set(one, mode="drop"), outs, out)

        of_one = jax.eval_shape(lambda state, token: step(state, token)[1], state, taken(0))
        outs = jax.tree.map(lambda x: _zeros(batch * seq, x), of_one)
        begun = state, cached if keeps > 1 else (), outs
        state, kept, outs = lax.fori_loop(0, jnp.max(self.counts), turn, begun)
        return kept if keeps > 1 else state, jax.tree.map(lambda x: x.reshape(batch, seq, *x.shape[1:]), outs)

    def windows(self, x: Array, last: Array) -> tuple[Array, Array]:
        """Each token with the `n` before it in its sequence, the oldest first, as a convolution sees them; 0 before the
        first.

        Args:
            x: `batch seq …`. last: `sequences n …`, the state, as the cache has it: the last n tokens before these.

        Returns: `batch seq n+1 …`, and the state after them.
        """
        (batch, seq), n = x.shape[:2], last.shape[1]
        flat, kept, last = x.reshape(batch * seq, *x.shape[2:]), last, self.before(last)
        places = jnp.arange(batch * seq, dtype=jnp.int32)
        owner = jnp.searchsorted(self.starts, places, side="right") - 1

        def at(owner: Array, offset: Array) -> Array:
            """The tokens at these offsets from their sequences' first new ones."""
            new = flat.at[self.starts[owner] + offset].get(mode="clip")
            return jnp.where(_along(offset >= 0, new), new, last.at[owner, n + offset].get(mode="clip"))

        offsets = places - self.starts[owner]
        windows = jnp.stack([at(owner, offsets - k) for k in range(n, -1, -1)], axis=1)
        sequences, keeps = jnp.arange(len(self.counts), dtype=jnp.int32), self._keeps(kept)
        for version in range(keeps):
            seen = self.counts if keeps == 1 else self.counts + version - (0 if self.drafts is None else self.drafts)
            after = jnp.stack([at(sequences, seen - k) for k in range(n, 0, -1)], axis=1).astype(last.dtype)
            place = self._kept(kept, self._version(seen - 1))
            kept = after if keeps == 1 else kept.at[place].set(after, mode="drop")
        return windows.reshape(batch, seq, *windows.shape[1:]), kept


def _zeros(rows: int, one: Any) -> Array:
    """So many rows in place of those of `one`, split as it is."""
    zeros = jnp.zeros((rows, *one.shape[1:]), one.dtype)
    return axes.reshard(zeros, one.sharding.spec) if current_explicit() else zeros


def _along(mask: Array, x: Array) -> Array:
    """`mask[first axis of x]`, to be broadcast with `x`."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
