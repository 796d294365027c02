"""On a CPU a query's bits do not depend on how many rows are computed with it, nor on what they are."""

from functools import partial

import jax
import numpy as np
import pytest

from axon.kernels.paged_attention.ragged import AttentionConfig
from axon.kernels.paged_attention.xla import paged_attention_xla
from axon.kernels.paged_attention.xla_product import product
from axon.serve.step import SAME_SUMS


def compiled(config, *arguments):
    """The output, and the cache after it."""
    run = partial(paged_attention_xla, config=config)
    out, cache = jax.jit(run).lower(*arguments).compile(compiler_options=SAME_SUMS)(*arguments)
    return np.asarray(out), cache


@pytest.mark.few(shape=((192, 8),))
@pytest.mark.parametrize("shape", [(4, 4), (8, 16), (64, 64), (64, 20), (128, 128), (192, 8), (576, 64), (64, 512)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_row_has_the_same_bits_however_many_there_are(shape, turned, rng):
    """`turned`: as keys are, of which the columns of the product are the rows."""
    inner, columns = shape
    a = rng.normal(size=(2, 3, 130, inner)).astype(np.float32)
    b = rng.normal(size=(2, 3, columns, inner) if turned else (2, 3, inner, columns)).astype(np.float32)

    def result(rows):
        of_rows = jax.jit(lambda a, b: product(a, b.swapaxes(2, 3) if turned else b)).lower(a[:, :, :rows], b)
        return np.asarray(of_rows.compile(compiler_options=SAME_SUMS)(a[:, :, :rows], b))

    expected = result(16)
    for rows in (1, 2, 5, 130):
        np.testing.assert_array_equal(result(rows)[:, :, :16], expected[:, :, :rows])


@pytest.mark.few(heads=(4,), kv_heads=(1,))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(2, 2, 8, 4), (4, 1, 8, 4), (4, 2, 8, 4), (3, 3, 64, 16)]
)
def test_a_last_query_has_the_same_bits_alone_and_after_others_in_a_crowd(
    heads, kv_heads, head_dim, page_size, rng, draw_problem
):
    """Alone it decodes; in the crowd it is the last of a chunk, beside another that decodes and one that prefills."""
    config, sizes = AttentionConfig(0.4), {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    crowd = draw_problem(rng, [(3, 13), (1, 9), (7, 7)], tokens=16, page_size=page_size, **sizes)
    table = np.asarray(crowd.inputs.page_table)
    alone = draw_problem(rng, [(1, 13), (0, 0), (0, 0)], tokens=3, page_size=page_size, **sizes)
    found, cache = compiled(config, crowd.q, crowd.k, crowd.v, crowd.cache, crowd.inputs)
    q, k, v = (np.array(x) for x in (alone.q, alone.k, alone.v))
    q[0], k[0], v[0] = crowd.q[2], crowd.k[2], crowd.v[2]
    inputs = alone.inputs.__class__(alone.inputs.kv_lens, table, alone.inputs.cu_q_lens)
    assert (compiled(config, q, k, v, cache, inputs)[0][0] == found[2]).all()


def test_a_product_is_that_of_numpy(rng):
    a, b = rng.normal(size=(2, 3, 5, 8)).astype(np.float32), rng.normal(size=(2, 3, 8, 7)).astype(np.float32)
    np.testing.assert_allclose(product(a, b), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)
