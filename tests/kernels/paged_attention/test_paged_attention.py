"""paged_attention(): the reference and the XLA form against the formula in float64, over ragged batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.kernels.paged_attention import Cache, paged_attention_reference
from axon.kernels.paged_attention.cache import stored
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = [paged_attention_reference, paged_attention_xla]
SEQUENCES, TOKENS, CAPACITY = 3, 12, 16
VARIANTS = [
    AttentionConfig(0.4),
    AttentionConfig(0.4, window=1),
    AttentionConfig(0.3, window=6),
    AttentionConfig(0.5, soft_cap=2.0),
]


@st.composite
def ragged_lengths(draw):
    """(queries, kv_len) of each sequence, the queries no more than there are rows."""
    left, made = TOKENS, []
    for _ in range(SEQUENCES):
        queries = draw(st.integers(0, min(left, CAPACITY)))
        made.append((queries, draw(st.integers(queries, CAPACITY))))
        left -= queries
    return draw(st.permutations(made))


@functools.cache
def jitted(implementation, config):
    return jax.jit(functools.partial(implementation, config=config))


def run(implementation, problem, config):
    return jitted(implementation, config)(problem.q, problem.k, problem.v, problem.cache, problem.inputs)


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


@pytest.mark.few(config=VARIANTS[2:3])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_ragged_batch_gives_the_formula_and_leaves_other_pages_alone(
    implementation, config, draw_problem, formula, check_cache
):
    @settings(max_examples=25)
    @given(ragged_lengths(), st.integers(0, 2**31 - 1))
    def holds(lengths, seed):
        problem = draw_problem(np.random.default_rng(seed), lengths)
        out, after = run(implementation, problem, config)
        check_cache(problem, after)
        assert relative(out, formula(problem, after, config)) < 1e-6

    holds()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 16), (1, 7)],  # decode: a first token, a full table, and one between
        [(0, 0), (12, 16), (0, 5)],  # only one sequence has queries
        [(4, 4), (4, 8), (4, 12)],  # lengths that fill their last page
        [(0, 0), (0, 0), (0, 0)],  # nothing but padding
        [(1, 9), (6, 6), (3, 14)],  # decode, prefill and verification in one call
    ],
)
def test_edges_give_the_formula(implementation, lengths, rng, draw_problem, formula, check_cache):
    problem = draw_problem(rng, lengths)
    out, after = run(implementation, problem, VARIANTS[0])
    check_cache(problem, after)
    assert relative(out, formula(problem, after, VARIANTS[0])) < 1e-6
    np.testing.assert_array_equal(out[sum(n for n, _ in lengths) :], 0)


@pytest.mark.few(config=VARIANTS[1:2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", VARIANTS[1:], ids=str)
def test_a_sink_takes_its_share_of_the_softmax_and_has_no_value(
    implementation, config, rng, draw_problem, formula, check_cache
):
    for lengths in ([(1, 9), (6, 6), (3, 14)], [(1, 1), (1, 16), (1, 7)], [(0, 0), (2, 5), (0, 0)]):
        problem = draw_problem(rng, lengths, sinks=True)
        out, after = run(implementation, problem, config)
        check_cache(problem, after)
        assert relative(out, formula(problem, after, config)) < 1e-6
        np.testing.assert_array_equal(out[sum(n for n, _ in lengths) :], 0)


@pytest.mark.few(config=VARIANTS[3:])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", VARIANTS[2:], ids=str)
def test_a_slope_times_how_far_the_key_is_from_its_query_is_added_to_a_score(
    implementation, config, rng, draw_problem, formula, check_cache
):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)], alibi_slopes=True, sinks=True)
    out, after = run(implementation, problem, config)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, config)) < 1e-6


@pytest.mark.few(config=VARIANTS[2:3])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("config", VARIANTS[2:], ids=str)
def test_a_bias_is_added_to_a_score_by_how_far_the_key_is_from_its_query(
    implementation, config, rng, draw_problem, formula, check_cache
):
    several_steps = {"page_size": 64, "columns": 5}
    problem = draw_problem(rng, [(1, 310), (6, 70), (3, 3)], distance_bias=True, **several_steps)
    out, after = run(implementation, problem, config)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, config)) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_as_many_rows_as_sequences_need_not_be_one_row_each(implementation, rng, draw_problem, formula, check_cache):
    problem = draw_problem(rng, [(2, 9), (0, 4), (1, 3)], tokens=3)
    out, after = run(implementation, problem, VARIANTS[2])
    check_cache(problem, after)
    assert relative(out, formula(problem, after, VARIANTS[2])) < 1e-6


@pytest.mark.few(dtype=("int8",), implementation=(paged_attention_xla,))
@pytest.mark.few(dtype=("float8_e4m3fn",), implementation=(paged_attention_reference,))
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_quantised_cache_is_read_as_it_is_kept(implementation, dtype, rng, draw_problem, formula, check_cache):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)], dtype=dtype)
    out, after = run(implementation, problem, VARIANTS[2])
    check_cache(problem, after)
    assert relative(out, formula(problem, after, VARIANTS[2])) < 1e-6


@pytest.mark.few(implementation=(paged_attention_xla,), dtype=("float32",), config=VARIANTS[::2])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_those_who_see_a_value_that_is_not_finite_are_touched_by_it(
    implementation, config, dtype, rng, draw_problem, check_not_finite
):
    attend = functools.partial(run, implementation)
    for lengths, number in (([(1, 9), (6, 6), (3, 14)], np.nan), ([(5, 9), (0, 3), (6, 6)], np.inf)):
        problem = draw_problem(rng, lengths, dtype=dtype)
        for sign in (1, -1):
            check_not_finite(attend, problem, config, sign * number)


@pytest.mark.few(kept=("bfloat16",), implementation=(paged_attention_xla,))
@pytest.mark.few(kept=("float32",), implementation=(paged_attention_reference,))
@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_queries_give_their_own_type(implementation, kept, rng, draw_problem, formula):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)], dtype=kept, q="bfloat16")
    out, after = run(implementation, problem, VARIANTS[0])
    assert out.dtype == jnp.bfloat16
    assert after.keys.dtype == kept
    assert relative(out, formula(problem, after, VARIANTS[0])) < 4e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prefill_in_chunks_is_one_prefill(implementation, rng, draw_problem):
    whole = draw_problem(rng, [(12, 12), (0, 0), (0, 0)])
    expected, after = run(implementation, whole, VARIANTS[2])
    cache, parts, done = whole.cache, [], 0
    for size in (5, 1, 6):
        rows = [np.roll(a, -done, axis=0) for a in (whole.q, whole.k, whole.v)]
        bounds = jnp.asarray([0, size, size, size], jnp.int32)
        inputs = AttentionInputs(jnp.asarray([done + size, 0, 0], jnp.int32), whole.inputs.page_table, bounds)
        out, cache = jitted(implementation, VARIANTS[2])(*rows, cache, inputs)
        parts.append(out[:size])
        done += size
    assert relative(np.concatenate(parts), expected) < 1e-6
    np.testing.assert_array_equal(cache.keys[1:], after.keys[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_may_share_the_pages_that_they_only_read(implementation, rng, draw_problem, formula):
    problem = draw_problem(rng, [(1, 9), (1, 9), (2, 10)])
    table = np.array(problem.inputs.page_table)
    table[1, :2] = table[0, :2]
    shared = problem.inputs.__class__(problem.inputs.kv_lens, jnp.asarray(table), problem.inputs.cu_q_lens)
    problem = problem.__class__(problem.q, problem.k, problem.v, problem.cache, shared)
    out, after = run(implementation, problem, VARIANTS[0])
    assert relative(out, formula(problem, after, VARIANTS[0])) < 1e-6


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_kept_token_is_off_by_at_most_its_types_rounding(dtype, rng):
    x = (rng.normal(size=(50, 2, 16)) * 10.0 ** rng.uniform(-6, 6, size=(50, 2, 1))).astype(np.float32)
    x[3] = 0
    kept, scales = (np.asarray(part) for part in jax.jit(stored, static_argnums=1)(x, dtype))
    largest = np.abs(x).max(axis=-1, keepdims=True)
    bound = largest / 254 if dtype == "int8" else np.maximum(np.abs(x) / 16, largest * 2.0**-10 / 448)
    assert np.all(np.abs(kept.astype(np.float32) * scales[..., None] - x) <= 1.001 * bound)


def test_a_donated_cache_is_updated_in_place(rng, draw_problem):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)])
    step = jax.jit(functools.partial(paged_attention_xla, config=VARIANTS[0]), donate_argnums=3)
    cache = problem.cache
    memory = step.lower(problem.q, problem.k, problem.v, cache, problem.inputs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.keys.nbytes + cache.values.nbytes


def test_an_empty_cache_is_a_pytree_of_zeros():
    cache = Cache.empty(3, 2, 4, 8, "int8")
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(3, 2, 4, 8)] * 2 + [(3, 2, 4)] * 2
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(cache))
    assert jax.tree.map(lambda a: a, Cache.empty(3, 2, 4, 8, "float32")).key_scales is None
