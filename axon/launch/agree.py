"""Agreements between the processes of a run: which goes first, whether to stop, and that all are to do the same."""

import json
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axon.errors import Unavailable
from axon.fields import changed
from axon.launch import key_value
from axon.launch.key_value import ProcessesError
from axon.launch.signals import Interrupted, Interrupts

T = TypeVar("T")


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
    find = jax.jit(partial(jnp.max, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("process")), find


_times: Counter[str] = Counter()
"""How often this process has come to an agreement by a name; the count is the same in every process."""


def _key(what: str) -> str:
    """The key of the next agreement by this name."""
    _times[what] += 1
    return f"axon/{what}/{_times[what]}"


@contextmanager
def process_0_first(what: str) -> Iterator[None]:
    """Process 0 runs the body first; the others enter once it has left without an error.

    Every process must call with the same names in the same order. They wait on the host, without a time limit, until
    one has failed: a collective of the devices would time out.
    """
    key = _key(what)
    if jax.process_index() > 0:
        key_value.wait(key)
    yield
    if jax.process_index() == 0 and jax.process_count() > 1:
        key_value.put(key, "done")


def from_process_0(what: str, make: Callable[[], Any]) -> Any:
    """The JSON value that `make` returns in process 0, where alone it is called, in all processes. What it raises as
    `Unavailable` is raised in all.

    Every process must call with the same names in the same order. They wait on the host, without a time limit, until
    one has failed.
    """
    index, count = key_value.processes()
    if count == 1:
        return make()
    last, key = f"axon/{what}/{_times[what]}", _key(what)
    if index == 0:
        for other in range(1, count) if _times[what] > 1 else ():
            key_value.wait(f"{last}/read/{other}")
        key_value.delete(last)
        key_value.put(f"{key}/value", json.dumps(_outcome(make)))
    value, unavailable = json.loads(key_value.wait(f"{key}/value"))
    key_value.put(f"{key}/read/{index}", "")
    if unavailable is not None:
        raise Unavailable(unavailable)
    return value


def _outcome(make: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return make(), None
    except Unavailable as error:
        return None, str(error)


def object_from_process_0(what: str, make: Callable[[], T]) -> T:
    """As `from_process_0`, of any object that can be pickled, and of any size."""
    if key_value.processes()[1] == 1:
        return make()
    made: list[bytes] = []

    def size() -> int:
        made.append(pickle.dumps(make()))
        return len(made[0])

    count = from_process_0(what, size)
    own = np.frombuffer(made[0], np.uint8) if made else np.zeros(count, np.uint8)
    split, find = _finder()
    shared = find(jax.make_array_from_process_local_data(split, own[None]))
    return pickle.loads(np.asarray(shared).tobytes())


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


def check_alike(what: str, account: Callable[[], Mapping[str, str]]) -> None:
    """Raise `ProcessesError`, in all processes, with each process and field that differs from process 0's.

    Every process must call, with the same names in the same order. They wait on the host, without a time limit, until
    one has failed. JAX need not have looked for devices, for which all processes have to live.

    Args:
        what: a name of what is compared. account: returns field → its value; called where there are several processes.
    """
    index, count = key_value.processes()
    if count == 1:
        return
    key, mine = _key(f"alike/{what}"), dict(account())
    key_value.put(f"{key}/{index}", json.dumps(mine))
    if index == 0:
        others = {other: json.loads(key_value.wait(f"{key}/{other}")) for other in range(1, count)}
        key_value.put(f"{key}/verdict", _verdict(mine, others))
    if verdict := key_value.wait(f"{key}/verdict"):
        raise ProcessesError(verdict)


def _verdict(first: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> str:
    """What differs, a line for each field and value; empty if nothing does."""
    lines: dict[str, list[int]] = {}
    for index, account in others.items():
        for path, expected, value in changed(first, account):
            lines.setdefault(f"{path}: {expected} in process 0, {value} in process {{}}", []).append(index)
    if not lines:
        return ""
    shown = "\n".join(f"  {line.replace('{}', _numbers(indices))}" for line, indices in lines.items())
    return f"the processes of this run differ in\n{shown}\nGive all the same configuration, data and software"


def _numbers(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
