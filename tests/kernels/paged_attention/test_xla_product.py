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
    options = SAME_SUMS if jax.__version_info__ >= (0, 12) else {}
    run = partial(paged_attention_xla, config=config)
    return np.asarray(jax.jit(run).lower(*arguments).compile(compiler_options=options)(*arguments)[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (4, 2)])
def test_a_last_query_has_the_same_bits_alone_and_after_others_in_a_crowd(heads, kv_heads, rng, draw_problem):
    """Alone it decodes; in the crowd it is the last of a chunk, beside another that decodes and one that prefills."""
    config = AttentionConfig(0.4)
    crowd = draw_problem(rng, [(3, 13), (1, 9), (7, 7)], tokens=16, heads=heads, kv_heads=kv_heads)
    table = np.asarray(crowd.inputs.page_table)
    alone = draw_problem(rng, [(1, 13), (0, 0), (0, 0)], tokens=3, heads=heads, kv_heads=kv_heads)
    found = compiled(config, crowd.q, crowd.k, crowd.v, crowd.cache, crowd.inputs)[2]
    cache = paged_attention_xla(crowd.q, crowd.k, crowd.v, crowd.cache, crowd.inputs, config)[1]
    q, k, v = (np.array(x) for x in (alone.q, alone.k, alone.v))
    q[0], k[0], v[0] = crowd.q[2], crowd.k[2], crowd.v[2]
    inputs = alone.inputs.__class__(alone.inputs.kv_lens, table, alone.inputs.cu_q_lens)
    assert (compiled(config, q, k, v, cache, inputs)[0] == found).all()


def test_a_product_is_that_of_numpy(rng):
    a, b = rng.normal(size=(2, 3, 5, 8)).astype(np.float32), rng.normal(size=(2, 3, 8, 7)).astype(np.float32)
    np.testing.assert_allclose(product(a, b), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)
