"""Which axes the patterns of a function name, whatever the layout: what a row of the table can have an effect on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names
from axon.axes.scope import Scope, activate


@dataclass(frozen=True)
class _Listener:
    """A placement that splits nothing, and notes each axis whose row it is asked for."""

    asked: set[str] = field(default_factory=set)
    explicit = False
    platform = "cpu"
    chip = ""
    splits_tiled_scatters = False
    has_host_memory = True
    overlap: Names = ()
    ring: Names = ()
    context = None

    def torus_ring_size(self, mesh_axes: Names) -> int:
        return 1

    def mesh_axes(self, name: str, kind: str = "activations") -> Names:
        self.asked.add(name)
        return ()

    def spec(self, names: Names, kind: str = "activations") -> PartitionSpec:
        self.asked.update(names)
        return PartitionSpec(*(None for _ in names))

    def in_block(self, kind: str) -> "_Listener":
        return self

    def stored_positions(self, seq: int) -> np.ndarray:
        return np.arange(seq)


def axes_used(fn: Callable[..., Any], *arguments: Any) -> frozenset[str]:
    """The axes, roles included (`seq.residual`), that tracing `fn` for these abstract arguments asks a layout about."""
    listener = _Listener()
    with activate(Scope(listener)):
        jax.eval_shape(lambda *given: fn(*given), *arguments)
    return frozenset(listener.asked)
