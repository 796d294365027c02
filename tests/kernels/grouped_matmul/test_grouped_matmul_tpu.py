"""The kernels in many tiles, interpreted with their copies watched; their tiles, their visits, and their compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.kernels.grouped_matmul.pieces import cover
from axon.kernels.grouped_matmul.tiling import (
    ROWS,
    VMEM,
    Problem,
    Tiles,
    gradient_pieces,
    gradient_tiles,
    gradient_vmem,
    product_pieces,
    product_tiles,
    product_vmem,
)
from axon.kernels.grouped_matmul.tpu_gradient import weight_gradient
from axon.kernels.grouped_matmul.tpu_product import product
from axon.kernels.grouped_matmul.visits import group_visits, most_group_visits, most_visits, row_visits
from axon.plan.flops import count_flops
from scripts.bench.cases.grouped_matmul import cases

TILES = Tiles(128, 128, 128)
SIZES = ([100, 0, 30, 150], [0, 0, 0, 0], [128, 128, 0, 1])


def numbers(make, sizes, rows, tile):
    """A table of visits and their count, as NumPy's."""
    visits, count = jax.jit(make, static_argnums=(1, 2))(sizes, rows, tile)
    return jax.tree.map(np.asarray, visits), int(count)


def owners(sizes, rows):
    return np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - sum(sizes)])


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_in_many_tiles_is_that_of_the_formula_and_has_no_race(transposed, sizes, rng, watched):
    x = rng.normal(size=(300, 256)).astype(np.float32)
    w = rng.normal(size=(4, 256, 256)).astype(np.float32)
    stored = w.swapaxes(1, 2) if transposed else w
    sizes = np.array(sizes, np.int32)
    made = product(x, stored, sizes, transposed=transposed, tiles=TILES, interpret=watched)
    weights = np.concatenate([w, np.zeros_like(w[:1])]).astype(np.float64)
    expected = np.einsum("re,reo->ro", x, weights[owners(sizes, 300)])
    np.testing.assert_allclose(made, expected, atol=1e-4)


@pytest.mark.few(sizes=SIZES[:1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_weight_gradient_in_many_tiles_is_that_of_the_formula_and_has_no_race(sizes, rng, watched):
    x, dy = (rng.normal(size=(300, columns)).astype(np.float32) for columns in (256, 256))
    sizes = np.array(sizes, np.int32)
    made = weight_gradient(x, dy, sizes, dtype=jnp.float32, tiles=TILES, interpret=watched)
    own = owners(sizes, 300)[:, None] == np.arange(4)
    expected = np.einsum("rg,re,ro->geo", own.astype(np.float64), x, dy, optimize=True)
    np.testing.assert_allclose(made, expected, atol=1e-4)


@st.composite
def work(draw):
    rows, tile = draw(st.sampled_from([(1, 8), (16, 16), (70, 8)]))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=6, max_size=6)))
    return np.diff(ends, prepend=0).astype(np.int32), rows, tile


@settings(max_examples=40)
@given(work())
def test_row_visits_cover_every_row_once_and_stay_within_their_bound(drawn):
    sizes, rows, tile = drawn
    visits, count = numbers(row_visits, sizes, rows, tile)
    assert visits.tile.shape == (most_visits(rows, len(sizes), tile),)
    assert count <= len(visits.tile)
    assert np.all(np.diff(visits.tile[:count]) >= 0)  # visits of a tile follow each other
    assert set(visits.tile[:count]) == set(range(-(-rows // tile)))
    owner = np.full(rows, len(sizes))
    for at, _, group, start, stop in zip(*(a[:count] for a in visits), strict=True):
        owner[max(start, at * tile) : min(stop, at * tile + tile)] = group
    np.testing.assert_array_equal(owner, owners(sizes, rows))


@settings(max_examples=40)
@given(work())
def test_group_visits_reach_every_group_in_turn_and_read_each_of_its_rows_once(drawn):
    sizes, rows, tile = drawn
    visits, count = numbers(group_visits, sizes, rows, tile)
    assert count <= len(visits.group) == most_group_visits(rows, len(sizes), tile)
    assert np.all(np.diff(visits.group[:count]) >= 0)
    assert set(visits.group[:count]) == set(range(len(sizes)))
    assert np.all(visits.eighth * 8 <= max(0, -(-rows // 8) * 8 - tile))
    read = np.zeros((len(sizes), rows), int)
    for eighth, group, start, stop in zip(*(a[:count] for a in visits), strict=True):
        assert stop == start or (eighth * 8 <= start and stop <= eighth * 8 + tile)
        read[group, start:stop] += 1
    np.testing.assert_array_equal(read, owners(sizes, rows) == np.arange(len(sizes))[:, None])


jitted_cover = jax.jit(cover, static_argnums=(2, 3))


def pieces_of(visits, count, first, rows, pieces):
    """What each visit multiplies of its tile, which begins at row `first`: (first row, rows), in pieces."""
    low, high = (np.clip(edge - first, 0, rows) for edge in (visits.start, visits.stop))
    found = jax.tree.map(lambda all_: np.asarray(all_)[:count], jitted_cover(low, high, rows, pieces))
    low, high = low[:count], high[:count]
    size = found.wholes * pieces.whole + found.rest
    used = low < high
    assert np.all((found.first <= low)[used])
    assert np.all((high <= found.first + size)[used])
    assert np.all(found.first + size <= rows)
    assert not np.any(size[~used])
    assert set(found.rest) <= {0, *pieces.rest}
    return size


def loads(rng, groups):
    """Sizes of groups of 8,192 rows, as of a balanced router and as of one whose experts differ; 20 of each."""
    for _ in range(20):
        yield rng.multinomial(8192, np.full(groups, 1 / groups)).astype(np.int32)
        yield rng.multinomial(8192, rng.dirichlet(np.full(groups, 4))).astype(np.int32)


@pytest.mark.few(groups=(8, 64))
@pytest.mark.parametrize("groups", [8, 16, 32, 64])
def test_a_product_multiplies_at_most_a_tenth_more_rows_than_groups_have(groups, rng):
    """Whole tiles of 512 rows would multiply 1.44 times the rows of 8 groups, and 4.9 times those of 64."""
    problem, found = Problem(8192, 1024, 1024, groups, 2, 2), []
    tiles = product_tiles(problem)
    for sizes in loads(rng, groups):
        visits, count = numbers(row_visits, sizes, 8192, tiles.rows)
        multiplied = pieces_of(visits, count, visits.tile * tiles.rows, tiles.rows, product_pieces(problem, tiles))
        found.append(multiplied.sum() / sizes.sum())
    assert min(found) >= 1
    assert np.mean(found) <= 1.1


@pytest.mark.few(groups=(16,))
@pytest.mark.parametrize("groups", [8, 16, 64])
def test_a_weight_gradient_contracts_what_fills_the_matrix_unit_for_each_group(groups, rng):
    """A tenth more than the rows of 8 groups. Of 128 rows a group, half take the unit twice, wherever they begin."""
    tiles, found = gradient_tiles(Problem(8192, 1024, 1024, groups, 2, 4)), []
    for sizes in loads(rng, groups):
        visits, count = numbers(group_visits, sizes, 8192, tiles.rows)
        contracted = pieces_of(visits, count, visits.eighth * 8, tiles.rows, gradient_pieces(tiles))
        assert contracted.sum() <= np.sum(-(-(sizes[sizes > 0] + 7) // 128) * 128)
        found.append(contracted.sum() / sizes.sum())
    assert groups > 8 or np.mean(found) <= 1.1


@settings(max_examples=40)
@given(st.integers(1, 2**18), st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 8, 64, 256]))
def test_tiles_divide_the_columns_and_fit_the_vmem_of_every_chip(rows, inner, columns, groups):
    for itemsize in (2, 4):
        problem = Problem(rows, inner * 128, columns * 128, groups, itemsize, itemsize)
        for choose, vmem in ((product_tiles, product_vmem), (gradient_tiles, gradient_vmem)):
            tiles = choose(problem)
            assert problem.inner % tiles.inner == problem.columns % tiles.columns == 0
            assert ROWS[0] <= tiles.rows <= ROWS[1]
            assert vmem(problem, tiles) <= VMEM


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_cost_of_a_case_is_what_its_kernels_say_of_themselves(case):
    counted = count_flops(case.function, *case.operands)
    assert (counted.flops, counted.uncounted) == (case.cost.flops, ())
