"""Sums over pages that are written out: those of NumPy, and with the same bits for one row as for many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.paged_attention import xla_written
from axon.serve.step import SAME_SUMS

BLOCKS, ROWS, PAGES = 3, 16, 9


def compiled(fn, *arguments):
    return np.asarray(jax.jit(fn).lower(*arguments).compile(compiler_options=SAME_SUMS)(*arguments))


@pytest.mark.skipif(not xla_written.fits(8, 4, 1), reason="until jax 0.12 XLA joins what a barrier divides")
@pytest.mark.few(kv_heads=(3,))
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page_size", "width"), [(3, 24, 6, 4), (2, 8, 4, 7), (1, 64, 16, 4), (8, 128, 32, 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_those_of_numpy_and_one_rows_are_those_among_many(kv_heads, head_dim, page_size, width, dtype, rng):
    cached = jnp.asarray(rng.normal(size=(PAGES, kv_heads, page_size, head_dim)), dtype)
    pages = jnp.asarray(rng.integers(PAGES, size=(BLOCKS, width)))
    q = rng.normal(size=(BLOCKS, kv_heads, ROWS, head_dim)).astype(np.float32)
    weights = rng.uniform(size=(BLOCKS, kv_heads, ROWS, width * page_size)).astype(np.float32)
    of_pages = np.asarray(cached.astype(jnp.float32)).astype(np.float64)[np.asarray(pages)]
    read = of_pages.swapaxes(1, 2).reshape(BLOCKS, kv_heads, -1, head_dim)
    row = int(rng.integers(ROWS))
    for fn, rows, arguments, expected in (
        (xla_written.scores, q, (cached, pages), q @ read.swapaxes(2, 3)),
        (xla_written.sums, weights, (cached, pages), weights @ read),
        (xla_written.total, weights, (cached,), weights.astype(np.float64).sum(-1)),
    ):
        many, one = (compiled(fn, some, *arguments) for some in (rows, rows[:, :, row : row + 1]))
        np.testing.assert_array_equal(one[:, :, 0], many[:, :, row])
        np.testing.assert_allclose(many, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("sizes", "fits"), [((64, 16, 2), False), ((65, 16, 1), False), ((64, 5, 1), False)])
def test_products_are_left_where_keys_are_shared_or_no_sum_of_sums_has_terms(sizes, fits):
    assert xla_written.fits(*sizes) == fits
