"""From the sequences that a process has read to global arrays: each process feeds its own devices' shards."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding


def host_sequences(sharding: NamedSharding, count: int) -> np.ndarray:
    """The numbers, ascending, of the sequences of a global `batch` of `count` in the shards of this process's devices.

    All of them where the batch is not split over processes. Processes may have sequences in common.
    """
    local = np.zeros(count, bool)
    for index in sharding.addressable_devices_indices_map((count,)).values():
        local[index[0] if index else slice(None)] = True
    return np.flatnonzero(local)


def place(
    shardings: Mapping[str, NamedSharding], batch: Mapping[str, np.ndarray], sequences: np.ndarray, count: int
) -> dict[str, Array]:
    """Arrays `batch …` of `count` sequences in all, from this process's `sequences` of them, otherwise whole."""
    if all(sharding.num_devices == 1 for sharding in shardings.values()):
        return _through_jit(tuple(sorted(shardings.items())))(batch)
    if jax.process_count() == 1:
        return jax.device_put(batch, shardings)

    def placed(value: np.ndarray, sharding: NamedSharding) -> Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(count)
            return value[slice(*np.searchsorted(sequences, (first, last))), *index[1:]]

        return jax.make_array_from_callback((count, *value.shape[1:]), sharding, part)

    return {name: placed(value, shardings[name]) for name, value in batch.items()}


@cache
def _through_jit(shardings: tuple[tuple[str, NamedSharding], ...]) -> Any:
    """The identity, compiled: its dispatch copies an array to a single device in a tenth of `device_put`'s time."""
    return jax.jit(lambda batch: batch, out_shardings=dict(shardings))
