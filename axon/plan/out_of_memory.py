"""Training that is too large for its devices: reported before it starts, when it runs out, or by a compiler."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from axon.errors import UserError
from axon.plan.compiled import memory_parts
from axon.plan.largest import largest_parameters, largest_traced
from axon.plan.memory import available, gib, least_memory, local_devices
from axon.plan.remedies import more, remedies, zero
from axon.train.step import Program

_EXCEEDED = re.compile(r"required for ([\w ]+) \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
_ASKED = re.compile(r"(?:allocat\w*|reserve) ([\d.]+) ?(bytes|[KMGT])")
_UNITS = {"bytes": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""What XLA says: the TPU's compiler of a program, an allocator of one array."""


def check_memory(program: Program) -> None:
    """Raise `UserError` if parameters, gradients and optimizer state alone are too much; nothing is traced."""
    room, needed = available(program.placement), sum(least_memory(program).values())
    if room is not None and needed > room:
        needs = f"training needs {gib(needed)} GiB of memory on each device, before any activation"
        advice = [*zero(program), f"a smaller model, or {more(program)}"]
        what = f"{needs}, and {_where(program)} has {gib(room)}"
        raise UserError(_message(program, what, "parameters", largest_parameters(program), advice))


def check_step(program: Program, compiled: Any) -> None:
    """Raise `UserError` if a compiled step's temporaries are more than the machine of a CPU has left.

    Linux would end the process without a message; an accelerator says so itself: see `memory_explained`.
    """
    if program.placement.platform != "cpu":
        return
    room, parts = available(program.placement), memory_parts(compiled)
    needed = parts["temporaries"] + parts["outputs"] - parts["aliased"]
    if room is not None and needed > room:
        needs = f"a step needs {gib(needed)} GiB of memory more on each device"
        what = f"{needs}, and {_where(program)} has {gib(room)} left"
        raise UserError(_of_a_step(program, what, times=needed / max(room, 1), short=needed - room))


@contextmanager
def memory_explained(program: Program) -> Iterator[None]:
    """Within, memory that runs out while training is a `UserError`: what takes it, and what would help."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or is_out_of_memory(error):
            raise UserError(_of_a_step(program, f"out of memory on {_where(program)}{_asked(str(error))}")) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of XLA's is about memory: other things can be exhausted, too."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and re.search(r"memory|allocat|hbm", text, re.IGNORECASE) is not None


def _asked(message: str) -> str:
    found = _ASKED.search(message)
    return f", where {gib(float(found[1]) * _UNITS[found[2]])} GiB more were asked for" if found else ""


def _where(program: Program) -> str:
    if program.placement.platform != "cpu":
        return f"each {program.placement.chip}"
    count = len(local_devices(program.placement))
    return "this machine" if count == 1 else f"each of this machine's {count} devices"


def did_not_fit(program: Program, target: str, message: str) -> str:
    """What the TPU compiler's RESOURCE_EXHAUSTED is for a person."""
    found = exceeded(message)
    if found is None:
        first = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
        return _of_a_step(program, f"the step does not fit {target}: {first}")
    what, needed, room = found
    return too_large(program, target, f"{what} {gib(needed)}", needed, room)


def exceeded(message: str) -> tuple[str, float, float] | None:
    """Of the TPU compiler's RESOURCE_EXHAUSTED what is too large, its bytes, and those that there are."""
    match = _EXCEEDED.search(message)
    if match is None:
        return None
    needed, room = (float(match[i]) * _UNITS[match[i + 1]] for i in (2, 4))
    return match[1].replace("HLO temporaries", "temporaries alone"), needed, room


def too_large(
    program: Program, target: str, what: str, needed: float, room: float, largest: Sequence[str] | None = None
) -> str:
    """By how much a compiled step is too large for a target; `largest` are the arrays that it makes, if known."""
    missing = f"{what} GiB on each device, which has {gib(room)}: {gib(needed - room)} GiB too little"
    return _of_a_step(program, f"the step does not fit {target}: {missing}", largest, short=needed - room)


def _of_a_step(
    program: Program, what: str, largest: Sequence[str] | None = None, times: float = 2, short: float | None = None
) -> str:
    arrays = largest_traced(program.trace().jaxpr.jaxpr) if largest is None else largest
    return _message(program, what, "arrays that a step makes", arrays, remedies(program, times, short))


def _message(program: Program, what: str, kind: str, largest: Sequence[str], advice: Sequence[str]) -> str:
    parts = ", ".join(f"{name} {gib(size)}" for name, size in least_memory(program).items())
    ranked = [f"  {number}. {line}" for number, line in enumerate(largest, 1)]
    lines = (f"{what}.", f"In GiB on each device: {parts}. The largest {kind}:", *ranked, "What would help:")
    return "\n".join((*lines, *(f"  {line}" for line in advice)))
