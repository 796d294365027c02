"""Which arrays a compiled program holds at once, by its schedule: what the temporaries of its peak are."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from axon.plan.compiled import VIEWS
from axon.plan.hlo import Instruction, Module, array_bytes

_Parts = tuple[frozenset[str], ...]

_IN_PLACE = ("dynamic-update-slice", "dynamic_update_slice")
"""Of the opcode or the name of what writes into one of its operands."""


def live_at_peak(program: Module) -> Mapping[str, int]:
    """Instruction → bytes of its result, of those that are alive together at the moment when they are most.

    An array lives from the instruction that makes it, in the program's order, to the last that reads it; arguments are
    not in it, nor are the program's results, which take their place. What the compiler shares or pads besides is not
    seen.
    """
    return _Lives(program, program.entry, is_entry=True).at_peak


@dataclass(frozen=True)
class _Lives:
    """The arrays that one computation makes; `is_entry`: its results have memory already, as its arguments."""

    program: Module
    name: str
    is_entry: bool = False

    @cached_property
    def lines(self) -> tuple[Instruction, ...]:
        return self.program.computations.get(self.name, ())

    @cached_property
    def buffers(self) -> dict[str, frozenset[str]]:
        """Instruction → the instructions whose results it makes, or hands on."""
        return {name: frozenset().union(*parts) for name, parts in self.parts.items()}

    @cached_property
    def parts(self) -> dict[str, _Parts]:
        """The `buffers` of each element of an instruction's result, where it is a tuple that is handed on."""
        found: dict[str, _Parts] = {}
        for one in self.lines:
            given = [found.get(name, ()) for name in one.operands]
            if one.opcode == "get-tuple-element" and given and len(given[0]) > 1:
                found[one.name] = (given[0][int(one.attribute("index") or 0)],)
            elif one.opcode == "tuple":
                found[one.name] = tuple(frozenset().union(*parts) for parts in given)
            elif one.opcode in ("while", "optimization-barrier") and len(given) == 1:
                found[one.name] = given[0]
            elif one.opcode in VIEWS or one.opcode.endswith("-done"):
                found[one.name] = (frozenset().union(*(part for parts in given for part in parts)),)
            elif any(word in one.opcode or word in one.name for word in _IN_PLACE) and given:
                found[one.name] = (max((frozenset().union(*parts) for parts in given), key=self._size),)
            else:
                found[one.name] = (frozenset([one.name]),)
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        sizes = {one.name: _bytes_made(one, self.types) for one in self.lines if one.name in self.buffers[one.name]}
        results = self.buffers[self.lines[-1].name] if self.is_entry and self.lines else ()
        return sizes | dict.fromkeys(results, 0)

    @cached_property
    def types(self) -> dict[str, int]:
        return {one.name: array_bytes(one.arrays) for one in self.lines}

    def _size(self, names: frozenset[str]) -> int:
        return sum(self.types[name] for name in names)

    @cached_property
    def at_peak(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for moment, one in enumerate(self.lines):
            last |= dict.fromkeys(self.buffers[one.name], moment)
            for operand in one.operands if one.opcode != "get-tuple-element" else ():
                last |= dict.fromkeys(self.buffers.get(operand, ()), moment)
        ends: dict[int, list[str]] = defaultdict(list)
        for name, moment in last.items():
            ends[moment].append(name)
        live, peak = dict[str, int](), dict[str, int]()
        total = most = 0
        for moment, one in enumerate(self.lines):
            if one.name in self.sizes:
                live[one.name] = self.sizes[one.name]
                total += live[one.name]
            inner = self._inner(one)
            if total + sum(inner.values()) > most:
                peak, most = live | inner, total + sum(inner.values())
            for name in ends[moment]:
                total -= live.pop(name, 0)
        return {name: size for name, size in peak.items() if size}

    def _inner(self, one: Instruction) -> dict[str, int]:
        """The most that a loop's body, or the larger branch, holds."""
        called = [_Lives(self.program, name).at_peak for name in one.called] if one.opcode != "fusion" else []
        return max(called, key=lambda held: sum(held.values()), default={})


def _bytes_made(one: Instruction, types: Mapping[str, int]) -> int:
    """Bytes of what an instruction makes: the type of a `-start` lists its operands too."""
    size = array_bytes(one.arrays)
    return size - sum(types.get(name, 0) for name in one.operands) if one.opcode.endswith("-start") else size
