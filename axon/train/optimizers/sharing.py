"""Functions of whole matrices, distributed over the devices that split them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names
from axon.axes.specs import entries, num_shards
from axon.train.optimizers.matrix import Matrix, axes_of_part

T = TypeVar("T")
K = TypeVar("K")

KIND = "optimizer"


def map_matrices(
    fn: Callable[..., Any], matrices: Mapping[str, Matrix], values: Mapping[str, Any], *shared: Array
) -> dict[str, Any]:
    """Path → `fn(stacks, *shared)` of all matrices of these parameters, sharded by the `optimizer` rows, as the result.

    Args:
        values: path → an array of the parameter's shape, or a tree of such and of arrays with 1 for its rows or
            columns, perhaps with further dimensions at the end. shared: arrays that are the same for all.
        fn: of such a tree of stacks `n rows columns …`, rows the shorter side; it returns a tree of the same
            structure and shapes. Matrices of equal shapes are stacked in one call.

    Where the layout splits matrices, the devices that split them exchange parts (an all-to-all each way for each split
    dimension), so that each has an even share of the matrices, whole. Devices with the same parts do the same work.
    """
    scope = axes.current()
    shapes = {path: [leaf.shape for leaf in jax.tree.leaves(tree)] for path, tree in values.items()}

    def split(matrix: Matrix) -> tuple[Names, ...]:
        return tuple(map(entries, scope.placement.spec(matrix.axes, KIND))) if scope else ((),) * len(matrix.axes)

    splits = {path: split(matrices[path]) for path in values}  # not in `local`, whose specs lack manual mesh axes

    def local(parts: Mapping[str, Any], *shared: Array) -> dict[str, Any]:
        blocks = [_Block.of(path, matrices[path], splits[path], tree, shapes[path]) for path, tree in parts.items()]
        return _mapped(fn, blocks, shared)

    if scope is None:
        return local(values, *shared)

    def spec(matrix: Matrix, value: Array) -> PartitionSpec:
        names = axes_of_part(matrix.axes, matrix.shape, value.shape)
        assert names is not None, (matrix, value.shape)
        return scope.placement.spec(names, KIND)

    specs = {path: jax.tree.map(lambda v, m=matrices[path]: spec(m, v), tree) for path, tree in values.items()}
    everywhere = [PartitionSpec()] * len(shared)
    return axes.per_device(local, (specs, *everywhere), specs)(dict(values), *shared)


@dataclass(frozen=True)
class _Form:
    """The shapes and splits that blocks exchanged in one collective have in common.

    Args:
        rows, columns: the sizes of their dimensions on this device. splits: the mesh axes that split each of them.
        present: for each leaf, which of them it has; elsewhere it has 1. further: each leaf's sizes after them.
        tree: the structure of the leaves.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    splits: tuple[Names, ...]
    present: tuple[tuple[bool, ...], ...]
    further: tuple[tuple[int, ...], ...]
    tree: Any

    def local(self, leaf: int) -> list[int]:
        """The shape of a leaf's part of a matrix."""
        sizes = zip(self.rows + self.columns, self.present[leaf], strict=True)
        return [size if present else 1 for size, present in sizes] + list(self.further[leaf])

    def whole(self, leaf: int) -> list[int]:
        """The shape of a leaf's matrix whose dimensions are not split."""
        shards = [num_shards(names) if p else 1 for names, p in zip(self.splits, self.present[leaf], strict=True)]
        local = self.local(leaf)
        return [size * n for size, n in zip(local, shards, strict=False)] + local[len(shards) :]

    def matrix(self, leaf: int) -> tuple[int, ...]:
        """`rows columns …` of a whole matrix."""
        whole, cut, end = self.whole(leaf), len(self.rows), len(self.splits)
        return (math.prod(whole[:cut]), math.prod(whole[cut:end]), *whole[end:])

    @property
    def batch(self) -> Any:
        """The key of forms whose matrices are stacked in one call."""
        return self.tree, tuple(self.matrix(leaf) for leaf in range(len(self.present)))

    def gathered(self, leaf: int, stack: Array) -> Array:
        """`n rows columns …`: this device's share of the matrices, zeros at the end where they do not divide."""
        missing = -len(stack) % math.prod(map(num_shards, self.splits))
        stack = jnp.pad(stack, [(0, missing)] + [(0, 0)] * (stack.ndim - 1))
        for dimension, names in enumerate(self.splits, 1):
            present = self.present[leaf][dimension - 1]
            if names:
                stack = _gathered(stack, dimension, names) if present else _own(stack, names)
        return stack.reshape(len(stack), *self.matrix(leaf))

    def scattered(self, leaf: int, stack: Array) -> Array:
        """The reverse of `gathered`, of a result of its shape: this device's part of all matrices, with the padding."""
        stack = stack.reshape(len(stack), *self.whole(leaf))
        for dimension, names in reversed(list(enumerate(self.splits, 1))):
            present = self.present[leaf][dimension - 1]
            if names:
                stack = _scattered(stack, dimension, names) if present else lax.all_gather(stack, names, tiled=True)
        return stack


@dataclass(frozen=True)
class _Block:
    """One device's part of a parameter's matrices, rows before columns.

    Args:
        order: the parameter's dimensions, those that count matrices first. leaves: arrays with these and further ones.
    """

    path: str
    order: tuple[int, ...]
    leaves: list[Array]
    form: _Form

    @classmethod
    def of(
        cls, path: str, matrix: Matrix, split: Sequence[Names], tree: Any, shapes: Sequence[tuple[int, ...]]
    ) -> "_Block":
        """Of a device's `tree`, of leaves that have these shapes on all devices together."""
        leaves, structure = jax.tree.flatten(tree)
        sides, rank = matrix.rows + matrix.columns, len(matrix.shape)
        shards = {d: num_shards(split[d]) for d in sides}
        form = _Form(
            *(tuple(matrix.shape[d] // shards[d] for d in side) for side in (matrix.rows, matrix.columns)),
            splits=tuple(split[d] for d in sides),
            present=tuple(tuple(shape[d] == matrix.shape[d] for d in sides) for shape in shapes),
            further=tuple(shape[rank:] for shape in shapes),
            tree=structure,
        )
        return cls(path, matrix.count + sides, leaves, form)

    def stacked(self, leaf: int) -> Array:
        """`n`, rows, columns and further dimensions, still split."""
        value = self.leaves[leaf]
        further = range(len(self.order), value.ndim)
        return lax.transpose(value, (*self.order, *further)).reshape(-1, *self.form.local(leaf))

    def restored(self, stacks: Sequence[Array]) -> Any:
        """The tree of results in the shapes of `stacked`."""
        leaves = []
        for value, stack in zip(self.leaves, stacks, strict=True):
            order = (*self.order, *range(len(self.order), value.ndim))
            ordered = stack.reshape([value.shape[d] for d in order])
            leaves.append(lax.transpose(ordered, [order.index(d) for d in range(value.ndim)]))
        return self.form.tree.unflatten(leaves)


def _mapped(fn: Callable[..., Any], blocks: Sequence[_Block], shared: Sequence[Array]) -> dict[str, Any]:
    """Path → `fn` of a device's blocks, exchanged before and after with the devices that split their matrices."""
    groups = _grouped(blocks, lambda block: block.form)
    mapped: dict[str, Any] = {}
    for (tree, shapes), forms in _grouped(groups, lambda form: form.batch).items():
        leaves = range(len(shapes))
        parts = [[form.gathered(leaf, _joined(groups[form], leaf)) for leaf in leaves] for form in forms]
        results = fn(tree.unflatten([jnp.concatenate(ones) for ones in zip(*parts, strict=True)]), *shared)
        back = zip(*(_cut(leaf, [len(part[0]) for part in parts]) for leaf in jax.tree.leaves(results)), strict=True)
        for form, stacks in zip(forms, back, strict=True):
            mapped |= _separated(groups[form], [form.scattered(leaf, stack) for leaf, stack in enumerate(stacks)])
    return mapped


def _joined(blocks: Sequence[_Block], leaf: int) -> Array:
    return jnp.concatenate([block.stacked(leaf) for block in blocks])


def _separated(blocks: Sequence[_Block], stacks: Sequence[Array]) -> dict[str, Any]:
    """Path → the tree of each of the blocks that were `_joined`."""
    counts = [len(block.stacked(0)) for block in blocks]
    parts = zip(*(_cut(stack[: sum(counts)], counts) for stack in stacks), strict=True)
    return {block.path: block.restored(part) for block, part in zip(blocks, parts, strict=True)}


def _cut(stack: Array, counts: Sequence[int]) -> list[Array]:
    return jnp.split(stack, list(accumulate(counts))[:-1])


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _own(stack: Array, names: Names) -> Array:
    """A device's share of matrices of which it has all."""
    share = len(stack) // num_shards(names)
    return lax.dynamic_slice_in_dim(stack, lax.axis_index(names) * share, share)


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
