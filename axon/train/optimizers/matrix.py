"""A parameter as matrices, inputs × outputs, by its axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axon.axes import Names, base
from axon.nn import ParamSpec

COUNTED = "experts"
"""The axis that counts matrices in whichever parameter has it."""


@dataclass(frozen=True)
class Matrix:
    """A parameter as a stack of matrices, inputs × outputs of its contraction.

    Args:
        axes, shape: the parameter's. count: its dimensions that count matrices; inputs, outputs: those that span them.
    """

    axes: Names
    shape: tuple[int, ...]
    count: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The shorter side; the inputs, of equal ones."""
        return min(self.inputs, self.outputs, key=self.length)

    @property
    def columns(self) -> tuple[int, ...]:
        """The longer side; the outputs, of equal ones."""
        return self.outputs if self.rows == self.inputs else self.inputs

    @property
    def number(self) -> int:
        """How many matrices there are."""
        return self.length(self.count)

    def length(self, side: Sequence[int]) -> int:
        """The product of the sizes of these dimensions."""
        return math.prod(self.shape[d] for d in side)


def as_matrix(spec: ParamSpec, separate: Sequence[str] = ()) -> Matrix | None:
    """The matrices of a parameter, or None if it has none: vectors, norms and biases.

    Stacked axes and `experts` count matrices, and so do outputs among `separate`: with "heads", a query projection
    `embed heads head_dim` is a matrix `embed × head_dim` for each head. (An input cannot: what sums over heads is one
    matrix.)
    """
    inputs = set(map(base, spec.inputs))
    count, rows, columns = list(range(spec.stack)), [], []
    for dimension, name in enumerate(map(base, spec.own), spec.stack):
        is_input = name in inputs
        counted = name == COUNTED or (name in separate and not is_input)
        (count if counted else rows if is_input else columns).append(dimension)
    if not (spec.decay and rows and columns):
        return None
    return Matrix(spec.axes, spec.shape, tuple(count), tuple(rows), tuple(columns))


def within(spec: ParamSpec) -> tuple[int, ...]:
    """The dimensions of one layer's, and one expert's, part of a parameter."""
    return tuple(d for d, name in enumerate(spec.axes) if d >= spec.stack and base(name) != COUNTED)


def axes_of_part(axes: Names, whole: Sequence[int], shape: Sequence[int]) -> Names | None:
    """The axes of an array derived from one with these axes and this `whole` shape: each dimension the same or 1, and
    perhaps further ones at the end, which are unnamed (`_2`, …), as dimensions of 1 are. None for any other shape."""
    if len(shape) < len(whole) or any(n not in (1, size) for n, size in zip(shape, whole, strict=False)):
        return None
    named = [name if n == size else f"_{d}" for d, (n, size, name) in enumerate(zip(shape, whole, axes, strict=False))]
    return (*named, *(f"_{d}" for d in range(len(whole), len(shape))))
