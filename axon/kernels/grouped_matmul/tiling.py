"""How large the tiles of the TPU kernels are: those that move the fewest bytes and fit the VMEM of every chip.

A tile of columns divides them, as 128 lanes do, so that no product reads past an edge. Rows need not be divided.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

from axon.kernels.grouped_matmul.pieces import Pieces
from axon.kernels.grouped_matmul.visits import most_group_visits, most_visits

LANES = 128
"""Columns a vector register: tiles of columns are multiples of it."""

DEPTH = 128
"""Rows that a matrix unit contracts at once, 256 on v6e and tpu7x: fewer take as long."""

ROWS = (128, 512)
"""Rows a tile, and a whole piece of one, at least and at most: fewer leave the MXU waiting for weights."""

VMEM = 40 * 2**20
"""Bytes that the tiles may take by formula. A core has 64 MiB on v5p and tpu7x, 128 MiB on v5e and v6e."""

VMEM_LIMIT = 48 * 2**20
"""What the compiler may use: the tiles, and what it spills."""


class Tiles(NamedTuple):
    """Of x's rows, of x's columns, and of the columns of what is multiplied with it."""

    rows: int
    inner: int
    columns: int


class Problem(NamedTuple):
    """What is multiplied: `rows inner` with `groups inner columns`, or in the gradient with `rows columns`."""

    rows: int
    inner: int
    columns: int
    groups: int
    itemsize: int  # bytes of an operand's element
    result: int  # bytes of a result's element
    weight: int | None = None  # bytes of a weight's element, if it is not as the other operand

    @property
    def weight_itemsize(self) -> int:
        return self.weight or self.itemsize

    @property
    def flops(self) -> int:
        """Of all rows, a multiply and an add being two."""
        return 2 * self.rows * self.inner * self.columns


def product_tiles(problem: Problem) -> Tiles:
    """Tiles of `rows inner` · `groups inner columns` → `rows columns`."""
    return _best(problem, _power_of_two(problem.rows), product_bytes, product_vmem)


def gradient_tiles(problem: Problem) -> Tiles:
    """Tiles of the sums `inner rows` · `rows columns` → `groups inner columns`."""
    return _best(problem, _power_of_two(2 * -(-problem.rows // problem.groups)), gradient_bytes, gradient_vmem)


def product_pieces(problem: Problem, tiles: Tiles) -> Pieces:
    """What a product multiplies at a time: about half an even group's rows, or in eighths of that.

    Larger pieces read a weight into the matrix unit less often: of 512 rows that is a fifth of the bundles on v6e, and
    a third on tpu7x. Smaller ones end nearer to their group's end.
    """
    even = problem.rows // problem.groups
    whole = min(max(1 << (even // 2).bit_length() >> 1, ROWS[0]), ROWS[1], tiles.rows)
    eighths = (1, 2, 3, 4, 6) if whole == ROWS[1] else range(1, 8)
    return Pieces(whole, tuple(whole // 8 * n for n in eighths))


def gradient_pieces(tiles: Tiles) -> Pieces:
    """What a weights' gradient contracts at a time, one piece a visit: as many rows as a matrix unit does, or more."""
    return Pieces(tiles.rows, tuple(range(DEPTH, tiles.rows, DEPTH)))


def product_bytes(problem: Problem, tiles: Tiles) -> int:
    """Bytes of HBM moved at most, if every visit is needed.

    With all of `inner` in one tile, a weight's tile stays for all visits of its group, and is read once.
    """
    visits = most_visits(problem.rows, problem.groups, tiles.rows)
    whole = tiles.inner == problem.inner
    weights = (problem.groups if whole else visits) * problem.inner * problem.columns
    x = (problem.rows if whole else visits * tiles.rows) * problem.inner * (problem.columns // tiles.columns)
    moved = x * problem.itemsize + weights * problem.weight_itemsize
    return moved + problem.rows * problem.columns * problem.result


def product_vmem(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM: operands and result twice (one is moved while the other is used), float32 sums and a product; and
    a weight that is converted once more."""
    rows, inner, columns = tiles
    weight = inner * columns
    moved = rows * inner * problem.itemsize + weight * problem.weight_itemsize + rows * columns * problem.result
    converted = weight * problem.itemsize if problem.weight_itemsize < problem.itemsize else 0
    return 2 * moved + 2 * rows * columns * 4 + converted


def gradient_bytes(problem: Problem, tiles: Tiles) -> int:
    """Bytes of HBM moved at most: x once for each tile of the other's columns, the other once for each of x's."""
    rows = most_group_visits(problem.rows, problem.groups, tiles.rows) * tiles.rows
    x = rows * problem.inner * (problem.columns // tiles.columns)
    dy = rows * problem.columns * (problem.inner // tiles.inner)
    return (x + dy) * problem.itemsize + problem.groups * problem.inner * problem.columns * problem.result


def gradient_vmem(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM, as `product_vmem`."""
    rows, inner, columns = tiles
    moved = (rows * inner + rows * columns) * problem.itemsize + inner * columns * problem.result
    return 2 * moved + 2 * inner * columns * 4


def _best(
    problem: Problem, rows: int, moved: Callable[[Problem, Tiles], int], vmem: Callable[[Problem, Tiles], int]
) -> Tiles:
    """The tiles that fit and move the fewest bytes; of equals the largest, which take the fewest steps."""
    candidates = (Tiles(rows, *pair) for pair in product(_divisors(problem.inner), _divisors(problem.columns)))
    fitting = [tiles for tiles in candidates if vmem(problem, tiles) <= VMEM]
    return min(fitting, key=lambda tiles: (moved(problem, tiles), -tiles.inner * tiles.columns))


def _power_of_two(rows: int) -> int:
    """The next one from `rows` on, within `ROWS`."""
    return min(max(1 << (rows - 1).bit_length(), ROWS[0]), ROWS[1])


def _divisors(columns: int) -> Iterable[int]:
    return (size for size in range(LANES, columns + 1, LANES) if columns % size == 0)
