"""What each instruction of a compiled program is for: its module, its phase of a step, its kind, whom it sends to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from axon.plan.collectives import Collective, collectives
from axon.plan.compiled import kernel_of, multiplies
from axon.plan.hlo import Instruction, Module
from axon.plan.origin import phase
from axon.plan.scopes import module_path

PRODUCTS, ELEMENTWISE, COLLECTIVES, COPIES = "matrix products", "element-wise, reductions", "collectives", "copies"
INDEXED, LOOPS, OTHER = "gathers and scatters", "loops and branches", "other"
KERNEL = "kernel "
"""Kinds of operation; of a kernel that XLA did not write its name follows."""

UPDATE, BETWEEN, ARGUMENTS, UNNAMED = "update", "between modules", "arguments", "(unnamed)"
"""In place of a module: what is outside of the differentiated function, as the optimizer; what is inside of it and in
no scope, as a sum of branches; what moves weights or the batch as they come; and what has no name in the program."""

WORK, WAITING, CONTROL = 2, 1, 0
"""Ranks of what a device does at once: a moment belongs to the highest."""

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_JOINED = re.compile(r"((?:.*/)?)\((.*)\)")  # of several operations, as jit(f)/(a/add:b/mul)
_ARGUMENT = re.compile(r"\w+(?:\.\w+)*\[.*")
_CONTROL = ("while", "conditional", "call")
_INDEXED = ("gather", "scatter", "dynamic-slice", "dynamic-update-slice", "sort")
_COPIES = ("copy", "transpose", "copy-start", "copy-done", "slice", "concatenate", "pad", "reshape", "bitcast-convert")
_LIBRARY_PRODUCTS = re.compile(r"gemm|matmul|cublas|nvjet|xmma|cutlass|\bdot\b", re.IGNORECASE)
_LIBRARY_ATTENTION = re.compile(r"fmha|flash|attention|cudnn.*sdpa", re.IGNORECASE)
_MEMORY = re.compile(r"memcpy|memset|MemcpyD|copy", re.IGNORECASE)


@dataclass(frozen=True)
class Role:
    """What an operation is for.

    Args:
        module: the path of the modules that it belongs to, as "attention/norm"; or what stands in its place.
        phase: forward, recomputed or backward; "" outside of the differentiated function. kind: one of this file's.
        collective: what it sends, of a collective that is known. rank: `WORK`, `WAITING` or `CONTROL`.
    """

    module: str
    phase: str
    kind: str
    collective: Collective | None = None
    rank: int = WORK


@dataclass(frozen=True)
class Roles:
    """The roles of a program's instructions, by name."""

    program: Module
    _known: dict[str, Role] = field(default_factory=dict)

    def of(self, name: str) -> Role | None:
        """The role of the instruction with this name; None where the program has no such."""
        if name not in self._known and name in self._instructions:
            self._known[name] = self._role(self._instructions[name])
        return self._known.get(name)

    def has(self, kernel: str, name: str) -> bool:
        """Whether the program has an instruction with this name, or a fusion that the kernel is named after."""
        return self.of(name) is not None or kernel in self._by_kernel

    def of_kernel(self, kernel: str, name: str) -> Role:
        """The role of a kernel that ran as part of the instruction `name`, or of none that is known: that of the fusion
        whose name it has, as in a graph of launches; else what its own name says."""
        own = self.of(name)
        if own is not None and (own.rank != CONTROL or kernel == name):
            return own
        if (fused := self.of(self._by_kernel.get(kernel, ""))) is not None:
            return fused
        within = own or Role(UNNAMED, "", OTHER)
        kind, rank = _kind_of_kernel(kernel), WORK
        if kind == COLLECTIVES:
            rank = WAITING
        elif kind == OTHER and own is not None:
            return own
        return Role(within.module, within.phase, kind, None, rank)

    # ---- by name --------------------------------------------------------------------------------------------------

    @cached_property
    def _instructions(self) -> dict[str, Instruction]:
        return {one.name: one for lines in self.program.computations.values() for one in lines}

    @cached_property
    def _by_kernel(self) -> dict[str, str]:
        """The name of a fusion as a GPU's kernel has it → as the program has it."""
        names = (one.name for one in self._instructions.values() if one.opcode == "fusion")
        return {re.sub(r"\W", "_", name): name for name in names}

    @cached_property
    def _callers(self) -> dict[str, Instruction]:
        """Computation → the instruction that runs it."""
        return {called: one for one in self._instructions.values() for called in one.called}

    @cached_property
    def _within(self) -> dict[str, str]:
        """Instruction → its computation."""
        return {one.name: name for name, lines in self.program.computations.items() for one in lines}

    @cached_property
    def _collectives(self) -> dict[str, Collective]:
        return {one.name: one for one in collectives(self.program)}

    # ---- one instruction ------------------------------------------------------------------------------------------

    def _role(self, one: Instruction) -> Role:
        name = self._op_name(one)
        moment, module = _placed(name)
        if (sent := self._sent(one)) is not None:
            return Role(module, moment, COLLECTIVES, sent, WAITING)
        kind = self._kind(one)
        waits = one.opcode.endswith(("-start", "-done"))
        return Role(module, moment, kind, None, CONTROL if kind == LOOPS else WAITING if waits else WORK)

    def _op_name(self, one: Instruction) -> str | None:
        """The name stack of the traced operation: its own; of a fusion without a module the first of its products, or
        of what else is in it, that has one; inside of a loop with that of the loop; of a copy that of its source.
        """
        names = [*_own_names(one), *self._inner_names(one)]
        name = next(filter(module_path, names), names[0] if names else None)
        if name is not None and (name.startswith("jit(") or _ARGUMENT.fullmatch(name)):
            return name
        if (caller := self._callers.get(self._within[one.name])) is not None:
            outer = self._op_name(caller)
            return outer if name is None or outer is None else f"{outer.rpartition('/')[0]}/{name}"
        source = self._instructions.get(one.operands[0]) if one.operands and one.opcode in _COPIES else None
        return None if source is None or source.opcode == "parameter" else self._op_name(source)

    def _inner_names(self, one: Instruction) -> Iterator[str]:
        inside = self.program.inside(one) if one.opcode == "fusion" else ()
        for inner in sorted(inside, key=lambda inner: inner.opcode not in ("dot", "convolution")):
            yield from _own_names(inner)

    def _sent(self, one: Instruction, hops: int = 4) -> Collective | None:
        """The collective that an instruction is, starts, or waits for."""
        if (own := self._collectives.get(one.name)) is not None:
            return own
        if one.opcode.endswith("-start"):
            inner = (line.name for called in one.called for line in self.program.computations.get(called, ()))
            return next((self._collectives[name] for name in inner if name in self._collectives), None)
        waits = one.opcode.endswith("-done") or "AsyncCollectiveDone" in "".join(one.called) + one.attributes
        started = self._instructions.get(one.operands[0]) if waits and one.operands and hops else None
        return None if started is None else self._sent(started, hops - 1)

    def _kind(self, one: Instruction) -> str:
        if one.opcode in _CONTROL:
            return LOOPS
        if one.opcode == "custom-call":
            return _kind_of_call(one)
        opcodes = {one.opcode, *(inner.opcode for inner in self.program.inside(one))}
        if multiplies(self.program, one):
            return PRODUCTS
        if not opcodes.isdisjoint(_INDEXED):
            return INDEXED
        if one.opcode in _COPIES:
            return COPIES
        return OTHER if one.opcode in ("infeed", "outfeed", "send", "recv", "rng-bit-generator") else ELEMENTWISE


def _own_names(one: Instruction) -> list[str]:
    """The names of the traced operations that an instruction was made of."""
    found = _OP_NAME.search(one.attributes)
    joined = found and _JOINED.fullmatch(found[1])
    if joined:
        return [f"{joined[1]}{part}" for part in joined[2].split(":")]
    return [found[1]] if found else []


def _placed(name: str | None) -> tuple[str, str]:
    """Phase and module, or what stands in its place, of an operation's name."""
    if name is None:
        return "", UNNAMED
    if _ARGUMENT.fullmatch(name):
        return "", ARGUMENTS
    moment = phase(name)
    return moment, module_path(name) or (BETWEEN if moment else UPDATE)


def _kind_of_call(one: Instruction) -> str:
    """The kind of a library's function, or of a kernel in Pallas."""
    kernel = kernel_of(one)
    if kernel is None:
        return OTHER
    return PRODUCTS if _LIBRARY_PRODUCTS.search(kernel) else KERNEL + kernel


def _kind_of_kernel(kernel: str) -> str:
    """The kind of a GPU's kernel by its name alone."""
    if "nccl" in kernel.lower():
        return COLLECTIVES
    if _LIBRARY_ATTENTION.search(kernel):
        return f"{KERNEL}attention"
    if _LIBRARY_PRODUCTS.search(kernel):
        return PRODUCTS
    return COPIES if _MEMORY.search(kernel) else OTHER
