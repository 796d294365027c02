"""The two memories that a program moves arrays between: the devices' own, and their host's."""

from typing import Any

import jax

from axon.axes.scope import current
from axon.errors import UserError

HOST = "pinned_host"
"""JAX's name for the host's memory that a device reads and writes by itself."""


def to_host(tree: Any) -> Any:
    """Arrays in the host's memory, sharded as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    """Arrays in the devices' own memory, sharded as they are; those that are there stay."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def is_on_host(x: Any) -> bool:
    """Whether an array's type says that it is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def check_host_memory(failure: str) -> None:
    """Raise `UserError`, which begins with `failure`, where the layout in force has no memory of the host to use."""
    scope = current()
    if scope is not None and not scope.placement.has_host_memory:
        raise UserError(f"{failure}: devices of this platform ({scope.placement.platform}) have no memory {HOST!r}")
