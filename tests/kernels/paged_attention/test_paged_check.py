"""checked=True: batches whose values are wrong are told so, with the sequence and the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from axon.kernels.paged_attention import Cache, paged_attention

CACHE = Cache.empty(8, 2, 4, 8, "float32")
ROWS = [jnp.ones((6, heads, 8)) for heads in (4, 2, 2)]
FINE = {"kv_lens": [6, 3], "page_table": [[1, 5], [3, 0]], "cu_q_lens": [0, 2, 5]}


@pytest.fixture(scope="module")
def step():
    def call(batch):
        return paged_attention(*ROWS, CACHE, **batch, checked=True)

    checked = jax.jit(checkify.checkify(call))
    return lambda batch: checked({name: jnp.asarray(values, jnp.int32) for name, values in batch.items()})


@pytest.mark.full
def test_a_right_batch_passes_and_gives_what_the_unchecked_one_does(step):
    error, (out, _) = step(FINE)
    error.throw()
    batch = {name: jnp.asarray(values, jnp.int32) for name, values in FINE.items()}
    np.testing.assert_array_equal(out, jax.jit(lambda batch: paged_attention(*ROWS, CACHE, **batch)[0])(batch))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_q_lens": [1, 2, 5]}, "cu_q_lens starts at 1, not at 0"),
        ({"cu_q_lens": [0, 2, 1]}, "sequence 1: cu_q_lens fall, by 1"),
        ({"cu_q_lens": [0, 4, 7]}, "cu_q_lens end at 7, past the last of 6 rows"),
        ({"kv_lens": [6, 9]}, "sequence 1: kv_len 9 is past its page table's 8 tokens"),
        ({"kv_lens": [1, 3]}, "sequence 0: kv_len 1 is less than its queries"),
        ({"page_table": [[1, 8], [3, 0]]}, "sequence 0: its page table points at page 8; pages 1 to 7 hold tokens"),
        ({"page_table": [[1, 5], [-2, 0]]}, "sequence 1: its page table points at page -2"),
        ({"page_table": [[1, 5], [0, 0]]}, "sequence 1: its page table points at page 0"),
        ({"page_table": [[1, 5], [5, 0]]}, "page 5 is written by 2 sequences"),
    ],
)
def test_a_wrong_batch_says_what_is_wrong(changed, message, step):
    error, _ = step(FINE | changed)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


def test_pages_that_are_only_read_may_be_shared_and_unused_entries_are_free(step):
    error, _ = step({"kv_lens": [6, 6], "page_table": [[1, 5], [1, 2]], "cu_q_lens": [0, 1, 2]})
    error.throw()
    error, _ = step(FINE | {"page_table": [[1, 5], [3, 99]]})
    error.throw()
