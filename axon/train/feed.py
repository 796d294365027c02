"""From the sequences that a process has read to global arrays: each process feeds its own devices' shards."""

from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding


def host_sequences(sharding: NamedSharding, shape: tuple[int, int]) -> np.ndarray:
    """The numbers, ascending, of the sequences of a global `batch seq` in the shards of this process's devices.

    All of them where the batch is not split over processes. Processes may have sequences in common.
    """
    local = np.zeros(shape[0], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        local[index[0] if index else slice(None)] = True
    return np.flatnonzero(local)


def place(sharding: NamedSharding, batch: dict[str, np.ndarray], sequences: np.ndarray, count: int) -> dict[str, Array]:
    """Arrays `batch seq` of `count` sequences in all, from this process's `sequences` of them, whole along `seq`."""
    if sharding.num_devices == 1:
        return _through_jit(sharding)(batch)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)

    def placed(value: np.ndarray) -> Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(count)
            return value[slice(*np.searchsorted(sequences, (first, last))), *index[1:]]

        return jax.make_array_from_callback((count, *value.shape[1:]), sharding, part)

    return {name: placed(value) for name, value in batch.items()}


@cache
def _through_jit(sharding: NamedSharding) -> Any:
    """The identity, compiled: its dispatch copies an array to a single device in a tenth of `device_put`'s time."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)
