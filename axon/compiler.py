"""XLA's options for each target: one table, each option with its reason and the figure that justified it.

`axon.train.step.Program` compiles its functions with them. A chip that is not in the table gets none. Figures: jax
0.12.0.1 with libtpu 0.0.50.1 unless they say otherwise, 2026-11-21; `docs/measurements.md` has the shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of XLA: its name and value, why it is set, and what was measured with and without it."""

    name: str
    value: Any
    reason: str
    figure: str


TABLE: Mapping[str, Sequence[Option]] = {}
"""`jax.Device.device_kind` → options; for GPUs the platform, `gpu`."""


def options(devices: Sequence[Any]) -> tuple[Option, ...]:
    """The options for a mesh of these devices, none for a CPU."""
    if not devices or devices[0].platform == "cpu":
        return ()
    kind = devices[0].device_kind if devices[0].platform == "tpu" else "gpu"
    return tuple(TABLE.get(kind, ()))


def compiler_options(devices: Sequence[Any]) -> dict[str, Any]:
    """The same as `jax.jit(compiler_options=…)` takes them."""
    return {option.name: option.value for option in options(devices)}
