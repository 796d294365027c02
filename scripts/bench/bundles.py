"""`axon bench kernels --bundles`: VLIW bundles that the TPU compiler makes of what each Pallas kernel does most.

About the cycles in which it is issued, with no TPU: a lower bound, in which neither stalls nor copies are. It ranks the
forms of a kernel, and a form that becomes slower is seen. The compiler's results are in `axon/plan/bundles.json`: `axon
bench kernels --compile` writes them again, and CI compares.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from axon.chips import KERNEL_CHIPS
from axon.errors import UserError
from axon.plan.bundles import RECORD, RecordedPart, recorded
from scripts.bench.case import Part
from scripts.bench.cases import attention, grouped_matmul, paged_attention, quantize, quantized_matmul, sampling
from scripts.bench.compiled import lowered
from scripts.bench.timing import progress

_ROOT = Path(__file__).parents[2]
_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
_NAME = r"\d+-(?:(?:jvp|transpose)_)*{call}_*(?:\.\d+)?-\d+-final_bundles\.txt"
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s+(?P<label>[A-Z]{2})?\s*:")
_BRANCH = "sbr.rel"


def all_parts() -> dict[str, Part]:
    """Every part of every operation's Pallas kernels for TPUs, by name."""
    rooms = (attention, paged_attention, grouped_matmul, quantize, quantized_matmul, sampling)
    return {str(part): part for room in rooms for part in room.parts()}


def record() -> None:
    """Compile every part for every chip, two at a time, and record the bundles; minutes on two cores."""
    parts = all_parts()
    programs = [(name, chip) for name in parts for chip in KERNEL_CHIPS]
    results = {name: RecordedPart(call=part.call, flops=part.flops, bundles={}) for name, part in parts.items()}
    with ThreadPool(2) as pool:
        for (name, chip), bundles in zip(programs, pool.imap(lambda one: count(*one), programs), strict=True):
            progress(f"{name}, {chip}: {bundles:,} bundles")
            results[name]["bundles"][chip] = bundles
    RECORD.write_text(json.dumps(results, indent=1) + "\n")


def count(name: str, chip: str) -> int:
    """The bundles of a part on a chip, by a compiler in a process of its own: its dump is asked for as it starts."""
    with TemporaryDirectory(prefix="axon-bundles.") as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder=folder)}".strip()
        command = [sys.executable, "-m", "scripts.bench.bundles", name, chip]
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{name} does not compile for {chip}: {(done.stderr.strip() or '?').splitlines()[-1]}")
        named = re.compile(_NAME.format(call=all_parts()[name].call))
        files = [file for file in Path(folder).iterdir() if named.fullmatch(file.name)]
        stretches = [length for file in files for length in _stretches(file)]
    if not stretches:
        raise UserError(f"the TPU compiler wrote no bundles of {name} for {chip}; its dump has other names than before")
    return max(stretches)


def _stretches(file: Path) -> Iterator[int]:
    """The bundles between two labels or branches of a kernel's program, for each such stretch."""
    cuts, last = {0}, 0
    with file.open(errors="ignore") as lines:
        for line in lines:
            if found := _BUNDLE.match(line):
                last = int(found[1], 0)
                if found["label"] or _BRANCH in line:
                    cuts.add(last)
    yield from (after - before for before, after in pairwise(sorted(cuts | {last + 1})))


def rows() -> list[dict[str, Any]]:
    """What is recorded, as a list of `{kernel, part, chip, bundles}`."""
    parts = all_parts()
    return [
        {"kernel": parts[name].operation, "part": parts[name].name, "chip": chip, "bundles": bundles}
        for name, part in recorded().items()
        for chip, bundles in part["bundles"].items()
    ]


def lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The rows as text, a part in a line."""
    of_part: dict[str, list[str]] = {}
    for row in rows:
        of_part.setdefault(f"{row['kernel']}: {row['part']}", []).append(f"{row['chip']} {row['bundles']:,}")
    yield from (f"{part}: {', '.join(chips)} bundles" for part, chips in of_part.items())


def main(name: str, chip: str) -> None:
    """Compile a part for a chip, in the process whose dump is read."""
    lowered(all_parts()[name], KERNEL_CHIPS[chip].topology).compile()


if __name__ == "__main__":
    main(*sys.argv[1:])
