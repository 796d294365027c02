"""Figures of a compiled program by itself: the memory it needs, its work, its kernels and its collectives."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from axon.plan.collectives import COLLECTIVES, Collective, collectives
from axon.plan.hlo import Instruction, Module, Scheduled, array_bytes

__all__ = [
    "COLLECTIVES",
    "Collective",
    "collectives",
    "count_instructions",
    "cycles",
    "device_bytes",
    "host_bytes",
    "kernels",
    "largest_arrays",
    "memory_parts",
    "pallas_calls",
    "total_bytes",
]

_PLUMBING = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "Sharding",
}
VIEWS = {"bitcast", "get-tuple-element", "parameter", "tuple", "while", "call", "conditional", "optimization-barrier"}
_PALLAS = 'custom_call_target="tpu_custom_call"'
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OURS = re.compile(r"/(axon_\w+)/[^/\"]*\"")
_SOURCE = re.compile(r'op_name="([^"]*)"')


def memory_parts(compiled: Any) -> dict[str, int]:
    """Bytes on each device while a program runs: arguments, outputs, aliased (both at once), temporaries, code."""
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }


def host_bytes(compiled: Any) -> int:
    """Bytes of the host's memory that each device uses while a program runs, what is aliased counted once.

    0 on CPU devices, whose own memory is the host's.
    """
    memory = compiled.memory_analysis()
    stored = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return stored + memory.host_temp_size_in_bytes


def device_bytes(compiled: Any) -> int:
    """Bytes on each device while a compiled program runs: arguments, results, temporaries and code."""
    return total_bytes(memory_parts(compiled))


def total_bytes(parts: Mapping[str, int]) -> int:
    """The sum of `memory_parts`, what is aliased counted once."""
    return sum(parts.values()) - 2 * parts["aliased"]


def count_instructions(text: str) -> int:
    """How many instructions a program has, those inside fusions and loop bodies included once each."""
    return sum(len(lines) for lines in Module.of(text).computations.values())


def cycles(module: Module) -> dict[str, int]:
    """The TPU compiler's estimates × how often each runs, in operations with a matrix product, and in others.

    It estimates neither Pallas kernels, nor collectives, nor copies: they are not in it, nor is what is asynchronous.
    """
    total = {"matmul": 0, "other": 0}
    for one in (one for one in module.scheduled if not one.asynchronous):
        total["matmul" if multiplies(module, one.instruction) else "other"] += one.instruction.cycles * one.times
    return total


def multiplies(module: Module, one: Instruction) -> bool:
    """Whether an instruction, or a fusion's inside, has a matrix product."""
    products = ("convolution", "dot")
    return one.opcode in products or any(inner.opcode in products for inner in module.inside(one))


def kernels(module: Module) -> dict[str, int]:
    """Kernels that XLA did not write (Pallas, cuBLAS, cuDNN), by name, and how often each is called."""
    called: Counter[str] = Counter()
    for name, one in _custom_calls(module):
        called[name] += one.times
    return dict(called)


def pallas_calls(module: Module) -> Iterator[tuple[str, Scheduled]]:
    """Each Pallas call for a TPU that a program has, and its name."""
    yield from ((name, one) for name, one in _custom_calls(module) if _PALLAS in one.instruction.attributes)


def _custom_calls(module: Module) -> Iterator[tuple[str, Scheduled]]:
    """By name, those inside fusions too, as on GPUs beside a slice of a stack."""
    for one in module.scheduled:
        fused = module.inside(one.instruction) if one.instruction.opcode == "fusion" else ()
        for each in (one.instruction, *fused):
            if (name := kernel_of(each)) is not None:
                yield name, replace(one, instruction=each)


def kernel_of(one: Instruction) -> str | None:
    """The name of the kernel that an instruction calls, if it calls one."""
    target = _TARGET.search(one.attributes)
    if one.opcode != "custom-call" or target is None or target[1] in _PLUMBING:
        return None
    return _kernel(one, target[1])


def _kernel(call: Instruction, target: str) -> str:
    """The name that a Pallas call was given, else its target. Of one for a TPU: JAX puts the names of its
    transformations around it, and XLA a number; of one for a GPU it is a scope."""
    if target == "tpu_custom_call":
        return re.sub(r"^(?:(?:jvp|transpose|vmap)_+)*|[_.\d]+$", "", call.name)
    scope = _OURS.search(call.attributes) if target.startswith("mosaic_gpu") else None
    return scope[1] if scope else target


def largest_arrays(module: Module, count: int = 5) -> list[str]:
    """The largest arrays that a program makes, each with its bytes and the traced operation that it comes from."""
    sizes: dict[tuple[str, str], int] = {}
    for one in module.scheduled:
        if one.instruction.opcode not in VIEWS:
            sizes |= _sizes(one)
    ranked = sorted(sizes.items(), key=lambda item: -item[1])[:count]
    return [f"{size / 2**30:.2f} GiB {array} {source}".rstrip() for (array, source), size in ranked]


def _sizes(one: Scheduled) -> dict[tuple[str, str], int]:
    source = _SOURCE.search(one.instruction.attributes)
    return {
        (f"{dtype}[{','.join(map(str, shape))}]", source[1] if source else ""): array_bytes(((dtype, shape),))
        for dtype, shape in one.instruction.arrays
    }
