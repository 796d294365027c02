"""Agreements between the processes of a run: which goes first, and whether to stop."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axon.launch import key_value
from axon.launch.signals import Interrupted, Interrupts


def largest(value: int) -> Any:
    """The largest `value` of all processes, a scalar computed asynchronously. Collective: every process must call."""
    if jax.process_count() == 1:
        return np.int32(value)
    split, find = _finder()
    return find(jax.make_array_from_process_local_data(split, np.array([value], np.int32)))


@lru_cache(maxsize=1)
def _finder() -> tuple[NamedSharding, Any]:
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[index] for index in sorted(firsts)]), ("process",), axis_types=(AxisType.Auto,))
    find = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("process")), find


_times: Counter[str] = Counter()
"""How often this process has entered `process_0_first` by a name; the count is the same in every process."""


@contextmanager
def process_0_first(what: str) -> Iterator[None]:
    """Process 0 runs the body first; the others enter once it has left without an error.

    Every process must call with the same names in the same order. They wait on the host, without a time limit, until
    one has failed: a collective of the devices would time out.
    """
    _times[what] += 1
    key = f"axon/{what}/{_times[what]}"
    if jax.process_index() > 0:
        key_value.wait(key)
    yield
    if jax.process_index() == 0 and jax.process_count() > 1:
        key_value.put(key, "done")


class AgreedStop:
    """Interrupts on which all processes agree: if one was interrupted, all see it at the same call of `ask`.

    `requested` is the signal, or None, and changes in `ask` alone.
    """

    def __init__(self, interrupts: Interrupts):
        self.requested: int | None = None
        self._interrupts = interrupts
        self._asked: deque[Any] = deque()

    def ask(self, behind: int = 0) -> bool:
        """Whether any process was asked to stop. Collective: every process must call, and gets the same answer.

        With `behind` the answer is that of so many calls before: the latest would wait for all steps in the devices'
        queue.
        """
        self._asked.append(largest(self._interrupts.requested or 0))
        while len(self._asked) > behind:
            self.requested = int(self._asked.popleft()) or self.requested
        return self.requested is not None

    def check(self) -> None:
        """Raises `Interrupted` if the last answer was to stop."""
        if self.requested is not None:
            raise Interrupted(self.requested)
