"""A parameter as matrices, inputs × outputs, by its axes; and work on matrices that each lie whole on one device."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.axes import Names, base
from axon.axes.specs import entries, num_shards
from axon.nn import ParamSpec

COUNTED = "experts"
"""The axis that counts matrices in whichever parameter has it."""


@dataclass(frozen=True)
class Matrix:
    """A parameter as a stack of matrices, inputs × outputs of its contraction.

    Args:
        axes: the parameter's. count: its dimensions that count matrices; inputs, outputs: those that span them.
    """

    axes: Names
    count: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions, those that count first, the inputs before the outputs."""
        return self.count + self.inputs + self.outputs


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
    return Matrix(spec.axes, tuple(count), tuple(rows), tuple(columns))


def within(spec: ParamSpec) -> tuple[int, ...]:
    """The dimensions of one layer's, and one expert's, part of a parameter."""
    return tuple(d for d, name in enumerate(spec.axes) if d >= spec.stack and base(name) != COUNTED)


Side = tuple[tuple[int, Names], ...]
"""The dimensions along a side of a matrix, each a size on this device and the mesh axes that split it."""


@dataclass(frozen=True)
class _Block:
    """One device's part of a parameter's matrices, the shorter side first."""

    path: str
    value: Array
    order: tuple[int, ...]
    sides: tuple[Side, Side]

    @classmethod
    def of(cls, path: str, matrix: Matrix, value: Array, split: Sequence[Names]) -> "_Block":
        """Of a device's shard, whose dimensions are split over these mesh axes."""
        first, last = (matrix.inputs, matrix.outputs)
        sides = [tuple((value.shape[d], split[d]) for d in side) for side in (first, last)]
        if _length(sides[0]) > _length(sides[1]):
            (first, last), sides = (last, first), sides[::-1]
        return cls(path, value, matrix.count + first + last, (sides[0], sides[1]))

    def stacked(self) -> Array:
        """`n, *rows, *columns`, still split."""
        sizes = [size for side in self.sides for size, _ in side]
        return lax.transpose(self.value, self.order).reshape(-1, *sizes)

    def restored(self, stack: Array) -> Array:
        """What `stacked` was made of."""
        shape = [self.value.shape[d] for d in self.order]
        return lax.transpose(stack.reshape(shape), [self.order.index(d) for d in range(len(shape))])


def map_matrices(
    fn: Callable[[Array], Array], matrices: Mapping[str, Matrix], values: Mapping[str, Array]
) -> dict[str, Array]:
    """`fn` of every matrix of these parameters, which lie under the `optimizer` rows, and stay there.

    `fn` is given `n rows columns`, rows the shorter side, and gives as much; equal shapes come in one batch. Each
    matrix is whole on one device: where the layout splits matrices, the devices among which it does exchange their
    parts (an all-to-all each way over each of these mesh axes) and share the matrices evenly. Devices that hold the
    same parts do the same work.
    """
    scope = axes.current()
    kind = "optimizer"
    specs = {path: scope.placement.spec(matrices[path].axes, kind) if scope else () for path in values}

    def local(shards: Mapping[str, Array]) -> dict[str, Array]:
        blocks = []
        for path, value in shards.items():
            split = tuple(map(entries, specs[path])) or ((),) * value.ndim
            blocks.append(_Block.of(path, matrices[path], value, split))
        return _mapped(fn, blocks)

    if scope is None:
        return local(values)
    return axes.per_device(local, (specs,), specs)(dict(values))


def _mapped(fn: Callable[[Array], Array], blocks: Iterable[_Block]) -> dict[str, Array]:
    """Path → `fn` of a device's blocks, after an exchange with the devices that hold the rest of their matrices."""
    alike = [list(same) for _, same in groupby(sorted(blocks, key=_sides), key=_sides)]
    exchanges = [_Exchange(same[0].sides, [block.stacked() for block in same]) for same in alike]
    done: dict[int, Array] = {}
    for shape in {exchange.shape: None for exchange in exchanges}:
        ours = [number for number, exchange in enumerate(exchanges) if exchange.shape == shape]
        parts = [exchanges[number].gathered() for number in ours]
        results = jnp.split(fn(jnp.concatenate(parts)), _ends(parts))
        done |= dict(zip(ours, results, strict=True))
    restored = {}
    for number, same in enumerate(alike):
        parts = exchanges[number].scattered(done[number])
        restored |= {block.path: block.restored(part) for block, part in zip(same, parts, strict=True)}
    return restored


@dataclass(frozen=True)
class _Exchange:
    """Blocks with the same sides: from parts of all matrices to all of some, and back."""

    sides: tuple[Side, Side]
    parts: Sequence[Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of a whole matrix."""
        return tuple(map(_length, self.sides))

    @property
    def _splits(self) -> list[tuple[int, Names]]:
        """The dimensions of a stack that are split, and the mesh axes that do."""
        dimensions = enumerate((names for side in self.sides for _, names in side), 1)
        return [(dimension, names) for dimension, names in dimensions if names]

    def gathered(self) -> Array:
        """`n rows columns`: this device's share of the matrices, filled up with zeros where they do not divide."""
        stack = jnp.concatenate(self.parts)
        missing = -len(stack) % num_shards(a for _, names in self._splits for a in names)
        stack = jnp.pad(stack, [(0, missing)] + [(0, 0)] * (stack.ndim - 1))
        for dimension, names in self._splits:
            stack = _gathered(stack, dimension, names)
        return stack.reshape(len(stack), *self.shape)

    def scattered(self, stack: Array) -> list[Array]:
        """The parts, of what was made of `gathered`."""
        sizes = [size * num_shards(names) for side in self.sides for size, names in side]
        stack = stack.reshape(len(stack), *sizes)
        for dimension, names in reversed(self._splits):
            stack = _scattered(stack, dimension, names)
        return jnp.split(stack[: sum(map(len, self.parts))], _ends(self.parts))


def _gathered(stack: Array, dimension: int, names: Names) -> Array:
    """From a part of `dimension` of all matrices to the whole of it for this device's share of them."""
    shards = num_shards(names)
    parts = stack.reshape(shards, -1, *stack.shape[1:])
    arrived = jnp.moveaxis(lax.all_to_all(parts, names, 0, 0), 0, dimension)
    shape = list(arrived.shape)
    shape[dimension : dimension + 2] = [shards * stack.shape[dimension]]
    return arrived.reshape(shape)


def _scattered(stack: Array, dimension: int, names: Names) -> Array:
    """The reverse of `_gathered`."""
    shards, shape = num_shards(names), list(stack.shape)
    shape[dimension : dimension + 1] = [shards, shape[dimension] // shards]
    parts = jnp.moveaxis(stack.reshape(shape), dimension, 0)
    arrived = lax.all_to_all(parts, names, 0, 0)
    return arrived.reshape(-1, *arrived.shape[2:])


def _length(side: Side) -> int:
    return math.prod(size * num_shards(names) for size, names in side)


def _sides(block: _Block) -> tuple[Side, Side]:
    return block.sides


def _ends(parts: Sequence[Array]) -> list[int]:
    """Where each of the stacks ends but the last."""
    ends = [len(part) for part in parts]
    return [sum(ends[: i + 1]) for i in range(len(ends) - 1)]
