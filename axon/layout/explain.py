"""The effect of a layout on each parameter, as rows of a table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names
from axon.layout.placement import Placement


@dataclass(frozen=True)
class ParameterRow:
    """One parameter under a layout. `split` has the mesh axes of each axis; bytes are those of its dtype."""

    path: str
    axes: Names
    shape: tuple[int, ...]
    split: tuple[Names, ...]
    bytes_per_device: int

    @property
    def replicated(self) -> bool:
        """Whether every device has all of it."""
        return not any(self.split)


def explain(placement: Placement, parameters: Mapping[str, ArraySpec], kind: str = "params") -> Iterator[ParameterRow]:
    """One row for each parameter, in the order given."""
    for path, spec in parameters.items():
        split = tuple(placement.mesh_axes(n, kind) for n in spec.axes)
        bytes_per_device = placement.bytes_per_device(replace(spec, kind=kind))
        yield ParameterRow(path, spec.axes, spec.shape, split, bytes_per_device)
