"""How long the Pallas kernels of a compiled program take: by their bundles, as the compiler has no estimate of them.

A kernel's *tile* is the part of it that is repeated; of it the FLOPs and, by the compiler, the bundles are known
(`axon bench kernels --bundles`). A core issues a bundle a cycle, and its matrix units have a peak, so a tile takes

    cycles = max(bundles, FLOPs ÷ FLOPs of a core's cycle)

and a call as many for each of its FLOPs, shared by the cores of a device; or as many as its bytes take at the memory's
bandwidth, if these are more. It says both to XLA. Pairs or rows that are computed and not needed, and the masks of
partial tiles, are not in it. The tile of attention has a head_dim of 128, those of experts are 512 wide; other widths
are counted like them.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import TypedDict

from axon.chips import KERNEL_CHIPS, chip_of
from axon.layout import Placement
from axon.plan.compiled import pallas_calls
from axon.plan.hlo import Module

RECORD = Path(__file__).with_name("bundles.json")
_COST = re.compile(r'"?cost_estimate"?:\s*\{([^}]*)')
_FLOPS, _BYTES = (re.compile(rf'"?{name}"?:\s*"?(\d+)') for name in ("flops", "bytes_accessed"))


class RecordedPart(TypedDict):
    """What a Pallas kernel does over and over: the longest stretch of its program without a branch.

    `call`: the Pallas call's name. `flops`: of the part, where it is most of what a call does. `bundles`: by chip.
    """

    call: str
    flops: int | None
    bundles: dict[str, int]


def recorded() -> dict[str, RecordedPart]:
    """Every part whose bundles are recorded, by its operation and name."""
    return json.loads(RECORD.read_text())


def recorded_chip(placement: Placement) -> str | None:
    """Which of `KERNEL_CHIPS` a placement's devices are; None for others."""
    chip = chip_of(placement.chip)
    return chip.name if chip is not None and chip.name in KERNEL_CHIPS else None


def flops_per_cycle(chip: str) -> dict[str, float]:
    """Call → FLOPs that it does in a cycle of a device, of a chip in `KERNEL_CHIPS` whose clock is known."""
    device = KERNEL_CHIPS[chip]
    if device.clock is None:
        return {}
    peak = device.peak / device.clock
    return {
        part["call"]: min(peak, device.cores * part["flops"] / part["bundles"][chip])
        for part in recorded().values()
        if part["flops"] is not None
    }


def kernel_cycles(module: Module, chip: str) -> dict[str, int]:
    """Kernel → cycles in one execution of a program on a device; kernels whose tile is not recorded are left out."""
    rates, cycles = flops_per_cycle(chip), Counter[str]()
    per_cycle = KERNEL_CHIPS[chip].bandwidth / (KERNEL_CHIPS[chip].clock or 1)
    for name, one in pallas_calls(module):
        cost = _COST.search(one.instruction.attributes)
        flops, moved = (cost and part.search(cost[1]) for part in (_FLOPS, _BYTES))
        if flops and moved and name in rates:
            busy, moving = int(flops[1]) / rates[name], int(moved[1]) / per_cycle
            cycles[name] += round(max(busy, moving)) * one.times
    return dict(cycles)
