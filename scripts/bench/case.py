"""A kernel at one configuration: what to compile for a chip, and what it costs by its formula."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from axon.kernels.cost import Cost


@dataclass(frozen=True)
class Case:
    """One configuration of an operation's Pallas kernel.

    Args:
        operation: the folder's name. name: of the configuration, as shown.
        function: of `operands`, to be traced abstractly. cost: of one call.
    """

    operation: str
    name: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    cost: Cost

    def __str__(self) -> str:
        return f"{self.operation}: {self.name}"


@dataclass(frozen=True)
class Part:
    """What a Pallas kernel does over and over: the longest stretch of its program without a branch.

    Args:
        operation: the folder's name. name: of the part, as shown.
        call: the name of the Pallas call.
        function: of `operands`, to be traced abstractly: a program in which that stretch is this part.
        flops: of the part, where it is most of what a call does: `axon.plan.bundles` counts by it.
    """

    operation: str
    name: str
    call: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    flops: int | None = None

    def __str__(self) -> str:
        return f"{self.operation}: {self.name}"
