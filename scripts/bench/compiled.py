"""A kernel compiled for a chip that is not here: whether it compiles, and how much VMEM it takes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axon.chips import Chip
from axon.plan.topology import devices
from scripts.bench.case import Case, Part

_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"\}')


@dataclass(frozen=True)
class Compiled:
    """The compiler's report of a case on a chip.

    Attributes:
        vmem: bytes of VMEM of the hungriest Pallas call; 0 where there is none.
        calls: how many Pallas calls there are.
        refused: the compiler's reason, if it refuses; None if it compiles.
    """

    vmem: int = 0
    calls: int = 0
    refused: str | None = None


def compile_case(case: Case, chip: Chip) -> Compiled:
    """Compile a case for one device of a chip. A refusal is a result; a missing compiler raises `UserError`."""
    try:
        text = lowered(case, chip.topology).compile().as_text() or ""
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return Compiled(refused=str(error).strip().splitlines()[0])
    found = list(_pallas(text))
    return Compiled(max(found, default=0), len(found))


def lowered(case: Case | Part, topology: str) -> Any:
    """A case, or what a part is part of, traced and lowered for one device of a topology, to be compiled."""
    mesh = Mesh(np.array(devices(topology)[:1]), ("one",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, PartitionSpec())
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in case.operands]
    function = jax.shard_map(
        case.function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(function).lower(*operands)


def _pallas(text: str) -> Iterator[int]:
    """VMEM of each Pallas call of a compiled program."""
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            used = _VMEM.search(line)
            yield int(used[1]) if used else 0
