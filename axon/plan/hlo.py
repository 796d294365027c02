"""The text of a compiled program (XLA's scheduled HLO): its instructions, and how often each runs in one execution."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from axon.parallel.expert.rounds import OVERFLOW_ROUNDS

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_CONTINUED = re.compile(r'\n(?="|\}, )')  # within the configuration of a Pallas call that XLA fused
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_FIGURE = 1 << 60  # what the compiler writes where it has none, about
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}

Arrays = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Instruction:
    """One line: `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, name: str) -> str | None:
        """The value of `name=value`, without braces and `%`."""
        found = re.search(rf"\b{name}=\{{?%?([\w.-]+)", self.attributes)
        return found[1] if found else None

    @property
    def arrays(self) -> Arrays:
        """Dtype and shape of what it makes."""
        return arrays(self.type)

    @property
    def cycles(self) -> int:
        """The compiler's estimate of one run; 0 where it gives none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found and int(found[1]) < _NO_FIGURE else 0

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs: a loop's body, a fusion's inside, …; a reducer is part of the operation."""
        names = {"while": ("body",), "fusion": ("calls",), "call": ("to_apply",)}.get(self.opcode)
        if names is None and self.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
            if listed:
                return tuple(re.findall(r"%?([\w.-]+)", listed[1]))
            names = ("true_computation", "false_computation")
        elif names is None and self.opcode in ("async-start", "call-start", "custom-call-start"):
            names = ("calls", "to_apply", "called_computations")
        return tuple(found for found in map(self.attribute, names or ()) if found)


@dataclass(frozen=True)
class Scheduled:
    """An instruction where it runs, and how often in one execution of the program.

    `asynchronous`: whether it is started and waited for, as what a TPU's SparseCores do, and other work
    may run meanwhile.
    """

    instruction: Instruction
    computation: str
    times: int
    asynchronous: bool = False


@dataclass(frozen=True)
class Module:
    """A program: computation → instructions in their order, and the one it begins with."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @classmethod
    def of(cls, text: str) -> "Module":
        computations: dict[str, list[Instruction]] = {}
        current, entry = "", ""
        for line in _CONTINUED.sub("", text).splitlines():
            if header := _COMPUTATION.match(line):
                current = header[2]
                computations[current] = []
                entry = current if header[1] else entry
            elif found := _INSTRUCTION.match(line):
                computations.setdefault(current, []).append(_parsed(found[1], found[2]))
        return cls({name: tuple(lines) for name, lines in computations.items()}, entry)

    @cached_property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """Every instruction that is scheduled by itself (those inside a fusion are not), and how often it runs."""
        return tuple(self._run(self.entry, 1))

    def _run(self, computation: str, times: int, asynchronous: bool = False) -> Iterator[Scheduled]:
        for one in self.computations.get(computation, ()):
            yield Scheduled(one, computation, times, asynchronous)
            if one.opcode != "fusion":
                trips = self.trips(one) if one.opcode == "while" else 1
                for name in one.called:
                    yield from self._run(name, times * trips, asynchronous or one.opcode.endswith("-start"))

    def inside(self, fusion: Instruction) -> Iterator[Instruction]:
        """The instructions of a fusion, and of fusions in it."""
        for name in fusion.called:
            for one in self.computations.get(name, ()):
                yield one
                if one.opcode == "fusion":
                    yield from self.inside(one)

    def trips(self, loop: Instruction) -> int:
        """How often a loop's body runs: as the compiler says, or the bound that its counter is compared with.

        JAX's loops of a known length count from 0 by 1; where the compiler writes out several rounds in a body, by so
        many. A loop whose length is not in the program counts once (see `unknown_loops`), but for one that a load of
        experts within capacity never enters.
        """
        return self._bound(loop) or int(OVERFLOW_ROUNDS not in loop.attributes)

    @property
    def unknown_loops(self) -> dict[str, int]:
        """Loops whose length is known only when they run, and as how many runs of its body each counts."""
        loops = [s.instruction for s in self.scheduled if s.times and s.instruction.opcode == "while"]
        return {loop.name: self.trips(loop) for loop in loops if self._bound(loop) is None}

    def _bound(self, loop: Instruction) -> int | None:
        if match := _TRIPS.search(loop.attributes):
            return int(match[1])
        lines = {one.name: one for one in self.computations.get(loop.attribute("condition") or "", ())}
        compared = [one for one in lines.values() if one.opcode in ("compare", "fusion")]
        operands = [lines[name] for one in compared for name in one.operands if name in lines]
        values = [value for one in operands if (value := _constant(one)) is not None]
        counters = [one for one in operands if one.opcode == "get-tuple-element"]
        return math.ceil(values[0] / self._stride(loop, counters)) if len(values) == 1 else None

    def _stride(self, loop: Instruction, counters: Sequence[Instruction]) -> int:
        """By how much a loop's body raises the one of what it carries that is compared; 1 where it does not say."""
        body = self.computations.get(loop.attribute("body") or "", ())
        if len(counters) != 1 or not body or body[-1].opcode != "tuple":
            return 1
        lines, stride = {one.name: one for one in body}, 0
        raised = lines.get(body[-1].operands[int(counters[0].attribute("index") or 0)])
        while raised is not None and raised.opcode == "add":
            found = [lines[name] for name in raised.operands if name in lines]
            stride += sum(_constant(one) or 0 for one in found)
            raised = next((one for one in found if one.opcode == "add"), None)
        return stride or 1


def _constant(one: Instruction) -> int | None:
    """The value of a whole number."""
    return int(one.operands[0]) if one.opcode == "constant" and one.operands[0].isdecimal() else None


def arrays(text: str) -> Arrays:
    """Dtype and shape of every array that a type names."""
    return tuple((dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _ARRAY.findall(text))


def array_bytes(found: Arrays) -> int:
    return sum(_SIZES.get(dtype, 4) * math.prod(shape) for dtype, shape in found)


def _parsed(name: str, rest: str) -> Instruction:
    rest = _COMMENT.sub("", rest)
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.search(rest, type_end)
    if opcode is None:
        return Instruction(name, "", rest, (), "")
    end = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : end]
    operands = tuple(part.strip().split(" ")[-1].lstrip("%") for part in inner.split(",")) if inner else ()
    return Instruction(name, opcode[1], rest[:type_end], operands, rest[end + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)
