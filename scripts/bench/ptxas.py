"""The report of `ptxas` on each kernel for GPUs, in `ptxas.json`, in this folder.

`axon bench kernels --compile` writes it again, and CI compares.
"""

import json
from pathlib import Path

from axon.errors import UserError
from scripts.bench.case import Case
from scripts.bench.gpu_cases import attention, grouped_matmul, paged_attention, quantized_matmul
from scripts.bench.ptxas_report import CompiledForGPU, compile_for_gpu
from scripts.bench.timing import progress

RECORD = Path(__file__).with_name("ptxas.json")

Figures = dict[str, dict[str, int]]
"""Kernel → its registers, bytes spilled, bytes of shared memory, and how many of its `wgmma` are serialised."""


def all_gpu_cases() -> list[Case]:
    """Every case of every operation that has kernels for GPUs."""
    rooms = (attention, grouped_matmul, paged_attention, quantized_matmul)
    return [case for room in rooms for case in room.gpu_cases()]


def recorded() -> dict[str, Figures]:
    """Case → its kernels' figures."""
    return json.loads(RECORD.read_text())


def record() -> None:
    """Compile every case for an H200, and record the figures; minutes on two cores."""
    results = {}
    for case in all_gpu_cases():
        results[str(case)] = figures(case, compile_for_gpu(case))
        progress(f"{case}: {results[str(case)]}")
    RECORD.write_text(json.dumps(results, indent=1) + "\n")


def figures(case: Case, found: CompiledForGPU) -> Figures:
    """Of a case that compiles. Raises `UserError` for one that the compiler refuses."""
    if found.refused is not None:
        raise UserError(f"{case}: the compiler refuses it: {found.refused}")
    return {
        one.name: {
            "registers": one.registers,
            "spilled": one.spilled,
            "shared": one.shared,
            "serialised": len(one.serialised),
        }
        for one in found.kernels
    }
