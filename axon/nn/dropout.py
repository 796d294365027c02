"""Dropout that depends on the sequence, the layer and the place in the model, never on the mesh or on accumulation."""

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import current, shard
from axon.checks import check_range
from axon.nn.inputs import Inputs


@dataclass(frozen=True)
class Dropout:
    """Zero a share `rate` of the elements and scale up the rest (Srivastava et al., JMLR 15, 2014).

    `name` tells its places in a block apart: it is folded into the key, and so is the sequence's number in the global
    batch.
    """

    rate: float
    name: str

    def __post_init__(self):
        check_range(self, "[0, 1)", "rate")

    def __call__(self, x: Array, inputs: Inputs) -> Array:  # batch seq.residual embed
        if self.rate == 0 or inputs.key is None or inputs.sequences is None:
            return x
        key = jax.random.fold_in(inputs.key, zlib.crc32(self.name.encode()))
        words = _words(key, inputs.sequences, x.shape[1], x.shape[2])
        limit = min(round((1 - self.rate) * 2**32), 2**32 - 1)
        return jnp.where(words < jnp.uint32(limit), x / (1 - self.rate), 0).astype(x.dtype)


def _words(key: Array, sequences: Array, seq: int, embed: int) -> Array:
    """32 random bits for each element of `batch seq.residual embed`, by its indices: each device makes its own.

    The key is folded with an index at a time, so that the result is sharded as the indices are. (Bits that are drawn
    for a shape are drawn whole on each device: on Explicit mesh axes the shape alone says nothing of a sharding.) The
    last fold is a hash of the channel under its position's key, and so as random as bits drawn from its result.
    """
    scope = current()
    stored = jnp.arange(seq) if scope is None else jnp.asarray(scope.placement.stored_positions(seq))
    positions, channels = shard(stored, "seq.residual"), shard(jnp.arange(embed), "embed")
    by_sequence = _folded(key, sequences)
    by_position = jax.vmap(_folded, in_axes=(0, None))(by_sequence, positions)
    by_channel = jax.vmap(jax.vmap(_folded, in_axes=(0, None)), in_axes=(0, None))(by_position, channels)
    return jax.random.key_data(by_channel)[..., 0]


def _folded(key: Array, indices: Array) -> Array:
    """A key for each index."""
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
