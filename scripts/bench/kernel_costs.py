"""`axon bench kernels --static`: each TPU kernel's cost by its formula, where it compiles, and its VMEM.

Nothing runs. The compilers' results are in `vmem.json`, in this folder: `axon bench kernels --compile` writes them
again, and CI compares.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from axon.chips import KERNEL_CHIPS
from axon.kernels.choice import OPERATIONS
from scripts.bench.case import Case
from scripts.bench.compiled import compile_case
from scripts.bench.timing import progress

RECORD = Path(__file__).with_name("vmem.json")


def all_cases() -> list[Case]:
    """Every case of every operation."""
    return [case for name in OPERATIONS for case in import_module(f"scripts.bench.cases.{name}").cases()]


def recorded() -> dict[str, dict[str, Any]]:
    """Case → chip → the most bytes of VMEM of a Pallas call (0: there is none), or the compiler's error."""
    return json.loads(RECORD.read_text())


def record() -> None:
    """Compile every case for every chip, and record the results; minutes on two cores."""
    results = {}
    for case in all_cases():
        made = {name: compile_case(case, chip) for name, chip in KERNEL_CHIPS.items()}
        results[str(case)] = {name: found.refused or found.vmem for name, found in made.items()}
        progress(f"{case}: {results[str(case)]}")
    RECORD.write_text(json.dumps(results, indent=1) + "\n")


def rows() -> list[dict[str, Any]]:
    """For each case: its cost, and for each chip the limit, the least time at the limit, and the VMEM."""
    known = recorded()
    return [
        {
            "operation": case.operation,
            "case": case.name,
            "flops": case.cost.flops,
            "bytes": case.cost.bytes,
            "intensity": case.cost.intensity,
            "chips": {chip: _on(case, chip, known.get(str(case), {}).get(chip)) for chip in KERNEL_CHIPS},
        }
        for case in all_cases()
    ]


def _on(case: Case, name: str, result: int | str | None) -> dict[str, Any]:
    chip = KERNEL_CHIPS[name]
    limit = "compute" if case.cost.intensity > chip.ridge else "memory"
    least = max(case.cost.flops / chip.peak, case.cost.bytes / chip.bandwidth)
    found = {"limit": limit, "ridge": chip.ridge, "least_ms": 1e3 * least}
    if result is None:
        return {**found, "compiled": "not recorded: axon bench kernels --compile"}
    if isinstance(result, int):
        return {**found, "vmem_mib": result / 2**20}
    return {**found, "compiled": f"refused: {result}"}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as text, a case in a line and each chip in one below it."""
    for row in rows:
        gflop, mib, each = row["flops"] / 1e9, row["bytes"] / 2**20, row["intensity"]
        yield f"{row['operation']}: {row['case']}: {gflop:,.1f} GFLOP, {mib:,.1f} MiB, {each:,.0f} FLOP/byte"
        for chip, found in row["chips"].items():
            yield f"  {chip:6} {_text(found)}"


def _text(found: dict[str, Any]) -> str:
    roof = f"{found['limit']} is the limit (ridge {found['ridge']:.0f} FLOP/byte), at least {found['least_ms']:.3f} ms"
    if "compiled" in found:
        return f"{roof}; {found['compiled']}"
    return f"{roof}; compiles, " + (f"VMEM {found['vmem_mib']:.1f} MiB" if found["vmem_mib"] else "plain XLA")
