"""Dropout that depends on the sequence, the layer and the place in the model, never on the mesh or on accumulation."""

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import shard
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
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(inputs.sequences)
        kept = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - self.rate, x.shape[1:]))(keys)
        return jnp.where(shard(kept, "batch seq.residual embed"), x / (1 - self.rate), 0).astype(x.dtype)
