"""A block of threads of the Hopper kernels of attention: the place that it works on, and its launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from axon.kernels.attention.gpu_support import Sizes
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.cost import Cost
from axon.kernels.warpgroups import launch

FIRST, STOP, WHOLE, WHOLE_STOP, START = range(5)
"""Columns of a kernel's table: see `axon.kernels.attention.gpu_tiles.table`."""


class Place(NamedTuple):
    """Where a block works: sequence, head, tile of its rows, and the tiles that it meets, as its table says."""

    sequence: Array
    head: Array
    tile: Array
    first: Array
    stop: Array
    whole: Array
    whole_stop: Array
    start: Array

    def partly(self, at: Array) -> Array:
        """Whether the pairs with tile `at` may have to be masked."""
        return (at < self.whole) | (at >= self.whole_stop)


def place(table: Any, longest_last: bool) -> Place:
    """The place of this block. Those that take longest under a causal mask begin first."""
    sequence, tile = lax.axis_index("sequence"), lax.axis_index("tile")
    tile = table.shape[1] - 1 - tile if longest_last else tile
    row = sequence if table.shape[0] > 1 else 0
    loop = (table[row, tile, column] for column in (FIRST, STOP, WHOLE, WHOLE_STOP, START))
    return Place(sequence, lax.axis_index("head"), tile, *loop)


@dataclass(frozen=True)
class Kernel:
    """A kernel: keys from `real_keys` on are padding; `cost` is one call's; `interpret` as Pallas has it."""

    config: AttentionConfig
    sizes: Sizes
    real_keys: int
    cost: Cost
    interpret: Any

    def launch(
        self, name: str, body: Callable[..., None], out_type: Any, buffers: Any, grid: tuple[int, int, int]
    ) -> Callable[..., Any]:
        """With a block for each head, tile and sequence of `grid`; `body` is every warpgroup's."""
        named: dict[str, int] = dict(zip(("head", "tile", "sequence"), grid, strict=True))
        name = f"axon_attention_{name}"
        return launch(name, body, out_type, buffers, named, self.cost, self.interpret, approx_math=True)


def array(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """A result of a kernel."""
    return jax.ShapeDtypeStruct(shape, dtype)
