"""What is told of a program that is too large for its chips."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from axon.axes.specs import mesh_axes_of

_EXCEEDED = re.compile(r"required for ([\w ]+) \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

CURE = (
    "More devices, Layout.zero=3, remat='full', a smaller Data.batch or Data.seq, or more Layout.microbatches may help"
)


def did_not_fit(target: str, message: str, held: Mapping[str, int], largest: Sequence[str]) -> str:
    """The TPU compiler's RESOURCE_EXHAUSTED, for a person; `held` and `largest`: see `too_large`."""
    told = _EXCEEDED.search(message)
    if told is None:
        first = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
        return f"the step does not fit {target}: {first}. {CURE}"
    needed, available = (float(told[i]) * _UNITS[told[i + 1]] for i in (2, 4))
    what = told[1].replace("HLO temporaries", "temporaries alone")
    return too_large(target, what, needed, available, held, largest)


def too_large(
    target: str, what: str, needed: float, available: float, held: Mapping[str, int], largest: Sequence[str]
) -> str:
    """By how much `what` is too large, what the arguments `held` take, and which arrays are largest."""
    gib = 2**30
    arguments = ", ".join(f"{name} {size / gib:.2f}" for name, size in held.items())
    listed = [f"  {number}. {line}" for number, line in enumerate(largest, 1)]
    return "\n".join(
        (
            f"the step does not fit {target}: {what} {needed / gib:.2f} GiB on each device, which has "
            f"{available / gib:.2f}: {(needed - available) / gib:.2f} GiB too little. "
            f"Its arguments, in GiB: {arguments}. The largest arrays that it makes:",
            *listed,
            CURE,
        )
    )


def largest_traced(jaxpr: core.Jaxpr, count: int = 5) -> list[str]:
    """The largest arrays of a traced step, as one device holds them, each with the operation that makes it.

    What the compiler fuses away is among them.
    """
    made = {text: size for equation in _equations(jaxpr) for text, size in _results(equation)}
    ranked = sorted(made.items(), key=lambda item: -item[1])[:count]
    return [f"{size / 2**30:.2f} GiB {text}" for text, size in ranked]


def _equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        bodies = [b for value in equation.params.values() for b in (value if isinstance(value, tuple) else (value,))]
        inner = [body for b in bodies if isinstance(body := getattr(b, "jaxpr", b), core.Jaxpr)]
        if equation.primitive.name == "pallas_call":
            inner = []
        yield from (found for body in inner for found in _equations(body))
        if not inner:
            yield equation


def _results(equation: Any) -> Iterator[tuple[str, int]]:
    """Text and bytes on a device of each result: a global array is divided by what splits it."""
    for variable in equation.outvars:
        array = variable.aval
        if hasattr(array, "sharding") and hasattr(array.dtype, "itemsize"):
            sizes = array.sharding.mesh.shape
            num_shards = math.prod(sizes[axis] for axis in mesh_axes_of(array.sharding.spec.partitions))
            shape = ",".join(map(str, array.shape))
            text = f"{array.dtype}[{shape}] of {equation.primitive.name}" + (
                f", split {num_shards}-way" if num_shards > 1 else ""
            )
            yield text, array.size * array.dtype.itemsize // num_shards
