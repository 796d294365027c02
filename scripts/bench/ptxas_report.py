"""Mosaic GPU kernels compiled for a GPU that is not here: registers, shared memory, and what `ptxas` warns of."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from axon.errors import UserError
from scripts.bench.case import Case
from scripts.bench.compiled import lowered

_NAME = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu)?(?:_kernel)?'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_SERIALISED = re.compile(r"^.*wgmma.*serialized.*$", re.MULTILINE)
_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclass(frozen=True)
class KernelReport:
    """One kernel, as `ptxas` and Mosaic report it.

    Attributes:
        name: of the kernel. registers: of a thread at the launch; warpgroups may give theirs to others.
        spilled: bytes of registers stored to and loaded from memory. shared: bytes of shared memory of a block, less
            its barriers.
        serialised: the warnings that a `wgmma` must wait where it need not; each costs much of the speed.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    serialised: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompiledForGPU:
    """The compiler's report of a case: its kernels, or the reason why it refuses."""

    kernels: tuple[KernelReport, ...] = ()
    refused: str | None = None


def compile_for_gpu(case: Case, topology: str = "h200:1") -> CompiledForGPU:
    """Compile a case for one GPU. A refusal is a result.

    Raises `UserError` where the compiler is missing, and for a kernel that this process has compiled already.
    """
    with TemporaryDirectory() as folder, _environment(_dumping(folder)):
        try:
            lowered(case, topology).compile()
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            return CompiledForGPU(refused=str(error).strip().splitlines()[0])
        return CompiledForGPU(tuple(_reports(Path(folder), case)))


def parse_report(ptxas: str, resources: str) -> KernelReport:
    """A kernel's report, of what `ptxas -v` prints and of Mosaic's estimate of its resources."""
    name, registers, shared = _NAME.search(ptxas), _REGISTERS.search(ptxas), _SHARED.search(resources)
    if name is None or registers is None or shared is None:
        raise ValueError(f"not a report of ptxas and Mosaic: {ptxas!r}, {resources!r}")
    spilled = sum(int(size) for size in _SPILLS.findall(ptxas))
    return KernelReport(name[1], int(registers[1]), spilled, int(shared[1]), tuple(_SERIALISED.findall(ptxas)))


def _reports(folder: Path, case: Case) -> Iterator[KernelReport]:
    """By name, since the numbers in the names of files differ: kernels are traced in one order, compiled in another."""
    ptxas, resources = (_by_kernel(folder, ending) for ending in (".ptxas", ".resources.txt"))
    if missing := resources.keys() - ptxas.keys():
        raise UserError(
            f"{case}: this process has compiled {', '.join(missing)} before, which is reported once a process"
        )
    for name in sorted(resources):
        yield parse_report(ptxas[name], resources[name])


def _by_kernel(folder: Path, ending: str) -> dict[str, str]:
    """`NAME_NUMBER` and the ending → the text of the file, by NAME."""
    return {path.name.removesuffix(ending).rpartition("_")[0]: path.read_text() for path in folder.glob(f"*{ending}")}


def _dumping(folder: str) -> dict[str, str]:
    """The variables that Mosaic reads when it compiles a kernel."""
    return {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
