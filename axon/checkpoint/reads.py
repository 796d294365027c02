"""How many bytes are read for a shard of a stored array: a chunk is read as a whole, whatever part of it is needed."""

import math
from typing import Any


def largest_read(stored: Any, wanted: Any) -> int:
    """Bytes of the chunks that the largest read of an array needs, of those that this process does: one per shard.

    `stored`: its metadata in the checkpoint. `wanted`: its shape, which may differ by padding, its sharding, and its
    dtype, in which the bytes are counted.
    """
    storage = getattr(stored, "storage_metadata", None)
    chunk = (storage and storage.chunk_shape) or stored.shape
    indices = wanted.sharding.addressable_devices_indices_map(tuple(wanted.shape)).values()
    reads = (math.prod(map(_places_read, index, wanted.shape, stored.shape, chunk)) for index in indices)
    return wanted.dtype.itemsize * max(reads, default=0)


def _places_read(part: slice, size: int, stored: int, chunk: int) -> int:
    """Of a dimension, the places in those chunks that have any of a part of it."""
    start, stop, _ = part.indices(size)
    chunk = max(1, chunk)  # of a dimension without places
    return -(-min(stop, stored) // chunk) * chunk - min(start, stored) // chunk * chunk
