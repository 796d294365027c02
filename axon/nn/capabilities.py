"""Declarations of a module about itself, each asked for with `isinstance`; a module without it has a default."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class CountsFlops(Protocol):
    flops: Callable[[int], int]
    """Forward FLOPs of one token in a sequence of `seq`; by default those of the module's matrices."""


@runtime_checkable
class ChoosesExperts(Protocol):
    chosen_experts: tuple[int, int]
    """How many experts multiply a token, and how many there are."""


@runtime_checkable
class NamesActivations(Protocol):
    remat_names: tuple[str, ...]
    """The activations that are worth keeping for the backward, as named by `checkpoint_name`."""


@runtime_checkable
class Rotates(Protocol):
    ropes: tuple[tuple[Any, int], ...]
    """Pairs of a `Rope` and the size of the heads that it rotates, whose angles are computed before the layers."""


@runtime_checkable
class HasPages(Protocol):
    paged_sizes: Callable[[Any, Any], Any]
    """The `PagedSizes` of a step over its pages, from `inputs` and `cache`."""


@runtime_checkable
class DiffersByLayer(Protocol):
    excepted_layers: frozenset[int]
    """The logical numbers of the layers in which the module does otherwise than in the others."""
    layer: int | None
    """While it is traced, one of the layers that the trace is of: all are excepted, or none. None: as if none were."""


@runtime_checkable
class ReportsMetrics(Protocol):
    step_metrics: Callable[[Mapping[str, Array]], dict[str, Array]]
    """Scalars of a step, from the statistics of the module's own variables by name, those of all layers."""


@runtime_checkable
class HasDims(Protocol):
    dims: Mapping[str, int]
    """Sizes of the named axes."""
