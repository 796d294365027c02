"""Random parts of a batch, by objectives that draw it: the same on every layout."""

import zlib

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.train.objective import Batch, sequences_of


def random_words(key: Array, name: str, batch: Batch) -> Array:
    """32 random bits for each position of each sequence, `batch _seq` uint32.

    They follow from `key`, `name`, the sequence's number in the global batch and the position's in the sequence, in
    whichever order the layout stores positions.
    """
    seq, scope = batch["tokens"].shape[1], axes.current()
    positions = jnp.arange(seq) if scope is None else jnp.asarray(scope.placement.stored_positions(seq))
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    by_sequence = jax.vmap(lambda number: jax.random.fold_in(key, number))(sequences_of(batch, key))
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return jax.random.key_data(fold(by_sequence, positions))[..., 0]
