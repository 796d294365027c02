"""What a compiled program says of itself: the memory it needs, its instructions and its collectives."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_OPCODE = re.compile(rf" ({'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}


@dataclass(frozen=True)
class Collective:
    """One collective of a program, on one device; a loop's body is counted once.

    Args:
        kind: one of `COLLECTIVES`. arrays: dtype and shape of each result.
        source: the traced operation that it comes from, as `jit(_train)/…/dot_general`.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    source: str

    @property
    def bytes(self) -> int:
        return sum(_SIZES.get(dtype, 4) * math.prod(shape) for dtype, shape in self.arrays)


def device_bytes(compiled: Any) -> int:
    """Bytes on each device while a compiled program runs: arguments, results, temporaries and code."""
    memory = compiled.memory_analysis()
    parts = ("argument", "output", "temp", "generated_code")
    return sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) - memory.alias_size_in_bytes


def count_instructions(text: str) -> int:
    """How many instructions a program has, those inside fusions and loop bodies included once each."""
    return sum(1 for line in text.splitlines() if _INSTRUCTION.match(line))


def collectives(text: str) -> list[Collective]:
    """Every collective of a program, a loop's once.

    The TPU compiler spreads one all-gather over several fusions, in copies that share their channel and source: they
    are one here. It writes some reduce-scatters as a computation `all-reduce-scatter`, an all-reduce and a slice
    inside: it is told here by that name.
    """
    copies: dict[tuple[str, str, str], dict[str, list[Collective]]] = {}
    for computation, name, rest in _instructions(text):
        if match := _OPCODE.search(rest):
            scattered = match[1] == "all-reduce" and computation.startswith("all-reduce-scatter")
            channel, source = _CHANNEL.search(rest), _SOURCE.search(rest)
            kind = "reduce-scatter" if scattered else match[1]
            one = Collective(kind, _results(rest, match), source[1] if source else "")
            key = (kind, channel[1] if channel else name, one.source)
            copies.setdefault(key, {}).setdefault(computation, []).append(one)
    return [one for places in copies.values() for one in max(places.values(), key=len)]


def _instructions(text: str) -> Iterator[tuple[str, str, str]]:
    """(computation, name, right-hand side) of each instruction."""
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            yield computation, instruction[1], instruction[2]


def _results(rest: str, opcode: re.Match[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The arrays that a collective makes; those of a `-start` come after its operands', where it lists both."""
    found = _ARRAY.findall(rest[: opcode.start()])
    operands = rest[opcode.end() : rest.index(")", opcode.end())].count(",") + 1
    made = found[operands : 2 * operands] if opcode[2] and len(found) >= 2 * operands else found
    return tuple((dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in made)
