"""What is told of a program that is too large for its chips."""

import re
from collections.abc import Sequence

_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_ALLOCATION = re.compile(
    r"Size: ([\d.]+[KMGT])(?:\s+Operator: op_name=\"([^\"]*)\"[^\n]*)?(?:\s+Shape: (\w+\[[\d,]*\]))?", re.DOTALL
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

CURE = "More devices, Layout.zero=3, remat='full', a smaller Data.batch or Data.seq, or Layout.microbatches help"


def did_not_fit(target: str, message: str) -> str:
    """The TPU compiler's RESOURCE_EXHAUSTED, for a person."""
    used = _USED.search(message)
    listed = message.partition("Largest program allocations in hbm:")[2]
    largest = [" ".join(filter(None, (size, shape, source))) for size, source, shape in _ALLOCATION.findall(listed)]
    if used is None:
        first = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
        return f"the step does not fit {target}: {first}. {CURE}"
    needed, available = (float(used[i]) * _UNITS[used[i + 1]] for i in (1, 3))
    return too_large(target, needed, available, largest[:5])


def too_large(target: str, needed: float, available: float, largest: Sequence[str]) -> str:
    """By how much, and which arrays are largest."""
    gib = 2**30
    listed = [f"  {number}. {line}" for number, line in enumerate(largest, 1)]
    return "\n".join(
        (
            f"the step does not fit {target}: each device needs {needed / gib:.2f} GiB and has {available / gib:.2f}, "
            f"{(needed - available) / gib:.2f} GiB too little. The largest arrays:",
            *listed,
            CURE,
        )
    )
