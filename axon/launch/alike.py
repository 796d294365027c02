"""Comparisons between the processes of a run before they compile anything: all have to do the same."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from axon.fields import changed
from axon.launch import key_value
from axon.launch.key_value import ProcessesError

_times: Counter[str] = Counter()
"""How often this process has compared by a name; the count is the same in every process."""


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
    _times[what] += 1
    key, mine = f"axon/alike/{what}/{_times[what]}", dict(account())
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
