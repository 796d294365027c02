"""Tiles of the TPU kernels of the quantised product, and the bytes that they move."""

from typing import NamedTuple

LANES = 128
"""The contracted dimension, its blocks and the columns are multiples of it."""

SUBLANES = 32
"""Rows of 8-bit values a vector register: tiles of rows are multiples of it, or of `LANES` where rows are lanes."""


class Tiles(NamedTuple):
    """Of rows, of the contracted dimension, and of columns.

    1,024 products of int8 add up to at most 2²⁴, so that a chip that multiplies them as floats still sums exactly.
    """

    rows: int = 512
    inner: int = 1024
    columns: int = 1024


def tiles_of(rows: int, inner: int, columns: int, blocks: int, largest: Tiles = Tiles()) -> Tiles:
    """The tiles for a product: a tile holds whole blocks, or a block whole tiles."""
    block = inner // blocks
    whole = block <= largest.inner
    step = SUBLANES if blocks == 1 else LANES
    return Tiles(
        min(largest.rows, -(-rows // step) * step),
        _divisor(inner, block, largest.inner) if whole else _divisor(block, LANES, largest.inner),
        _divisor(columns, LANES, largest.columns),
    )


def bytes_moved(rows: int, inner: int, columns: int, blocks: int, itemsize: int, tiles: Tiles) -> int:
    """Bytes of HBM: x once for each tile of columns, w once for each tile of rows, the scales, and the result."""
    across, down = columns // tiles.columns, -(-rows // tiles.rows)
    scales = 4 * blocks * (rows + columns * down)
    return rows * inner * across + inner * columns * down + scales + rows * columns * itemsize


def _divisor(size: int, step: int, most: int) -> int:
    """The largest multiple of `step`, up to `most`, that divides `size`."""
    return max(tile for tile in range(step, min(size, most) + 1, step) if size % tile == 0)
