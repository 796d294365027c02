"""Regions in which the stages of a pipeline run by themselves: manual over their mesh axis."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names
from axon.axes.specs import entries

PIPE = "pipe"
"""The mesh axis of the stages."""


def in_stage() -> bool:
    """Whether this is traced for a stage by itself."""
    return PIPE in jax.sharding.get_abstract_mesh().manual_axes


@dataclass(frozen=True)
class Region:
    """`region(fn, outputs)` is `fn`, run by each stage by itself.

    Args:
        manual: the mesh axes that are manual in it, `PIPE` first.
    """

    manual: Names

    @property
    def batch_only_axes(self) -> Names:
        """The axes that split the batch, and not the stages."""
        return self.manual[1:]

    def __call__(self, fn: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """`outputs` are the specs of what `fn` gives, of the manual mesh axes."""

        def run(*arguments: Any) -> Any:
            specs = jax.tree.map(self.spec, arguments)
            mapped = jax.shard_map(fn, in_specs=specs, out_specs=outputs, axis_names=set(self.manual), check_vma=False)
            return mapped(*arguments)

        return run

    def spec(self, x: Any) -> PartitionSpec:
        """The part of an array's spec that is about the manual mesh axes."""
        split = (tuple(a for a in entries(entry) if a in self.manual) for entry in spec_of(x))
        return PartitionSpec(*(axes or None for axes in split))


def bytes_per_device(aval: Any) -> int:
    """Of an array of this type, on one device."""
    sizes = aval.sharding.mesh.shape
    shards = math.prod(sizes[a] for entry in aval.sharding.spec for a in entries(entry))
    return aval.dtype.itemsize * math.prod(aval.shape) // shards


def spec_of(x: Any) -> PartitionSpec:
    """The spec of an array, or of one that is only described."""
    return (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).sharding.spec
