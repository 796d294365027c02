"""The TPU kernel, interpreted on a CPU, against the formula in float64; races, and what it compiles to."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.chips import KERNEL_CHIPS
from axon.kernels.paged_attention import tpu, tpu_write
from axon.kernels.paged_attention.ragged import AttentionConfig
from axon.kernels.paged_attention.tpu import paged_attention_tpu, tables_tpu
from scripts.bench.cases.paged_attention import cases

PLAIN, WINDOW, CAP = AttentionConfig(0.4), AttentionConfig(0.3, window=6), AttentionConfig(0.5, soft_cap=2.0)
MIXED = [(1, 9), (6, 6), (0, 3), (3, 14)]
QUANTISED = ["int8", "float8_e4m3fn"]


@pytest.fixture(autouse=True)
def two_pages_a_step(monkeypatch):
    monkeypatch.setattr(tpu, "KEYS", 8)


@functools.cache
def jitted(config, interpret, queries, cores, blocks_a_core):
    @jax.jit
    def call(q, k, v, cache, inputs):
        tables = tables_tpu(q, cache, inputs, queries=queries)
        return paged_attention_tpu(q, k, v, cache, inputs, config, tables, cores=cores, interpret=interpret)

    return call


def run(problem, config, *, interpret=True, queries=2, shares=1, splits=1):
    """On `splits` cores that each attend to a part of all pages, or on `shares` that each have some of the blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "BLOCKS_A_CORE", 1 if shares > 1 else 1000)
        step = jitted(config, interpret, queries, max(shares, splits), tpu.BLOCKS_A_CORE)
        return step(problem.q, problem.k, problem.v, problem.cache, problem.inputs)


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "dtype", "queries", "splits"),
    [
        pytest.param(PLAIN, "float32", 1, 1, marks=pytest.mark.slow),
        (WINDOW, "float32", 4, 1),
        (CAP, "float32", 2, 3),
        (WINDOW, "int8", 2, 2),
        (PLAIN, "float8_e4m3fn", 4, 1),
    ],
)
def test_the_kernel_gives_the_formula(config, dtype, queries, splits, rng, draw_problem, formula, check_cache):
    problem = draw_problem(rng, MIXED, dtype=dtype)
    out, after = run(problem, config, queries=queries, splits=splits)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, config)) < 1e-6
    np.testing.assert_array_equal(out[10:], 0)


@pytest.mark.full
@pytest.mark.few(dtype=("int8",))
@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
def test_only_those_who_see_a_value_that_is_not_finite_are_touched_by_it(dtype, rng, draw_problem, check_not_finite):
    problem = draw_problem(rng, MIXED, dtype=dtype)
    for config, number in ((PLAIN, np.nan), (WINDOW, -np.inf)):
        check_not_finite(functools.partial(run, queries=4), problem, config, number)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "page_size"), [("int8", 48), *(pytest.param(d, 80, marks=pytest.mark.slow) for d in QUANTISED)]
)
def test_every_position_of_pages_that_no_tile_of_32_rows_divides_gets_its_token(
    dtype, page_size, rng, draw_problem, formula, check_cache
):
    length = 3 * page_size + 5
    sequences = [(2 * page_size + 1, length), (1, page_size), (3, page_size + 2), (0, 7)]
    problem = draw_problem(rng, sequences, tokens=2 * page_size + 9, page_size=page_size, dtype=dtype)
    out, after = run(problem, PLAIN, queries=4)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, PLAIN)) < 1e-6


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(dtype=("bfloat16", "int8"), given=(("sinks", "alibi_slopes"),))
@pytest.mark.parametrize(("config", "division"), [(PLAIN, {}), (CAP, {"splits": 3}), (WINDOW, {"shares": 2})], ids=str)
@pytest.mark.parametrize("given", [("sinks",), ("alibi_slopes",), ("sinks", "alibi_slopes")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sinks_and_slopes_take_part_whether_cores_share_blocks_or_split_pages(
    given, dtype, config, division, rng, draw_problem, formula, check_cache
):
    problem = draw_problem(rng, MIXED, dtype=dtype, heads=6, **dict.fromkeys(given, True))
    out, after = run(problem, config, **division)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, config)) < 1e-6


@pytest.mark.full
@pytest.mark.some(dtype=("float32",))
@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_narrow_heads_whose_tokens_lie_along_lanes_give_the_formula(
    head_dim, dtype, rng, draw_problem, formula, check_cache
):
    problem = draw_problem(rng, MIXED, dtype=dtype, head_dim=head_dim, sinks=True)
    out, after = run(problem, WINDOW, queries=4)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, WINDOW)) < 1e-6


@pytest.mark.full
@pytest.mark.few(count=(3,))
@pytest.mark.parametrize("count", [2, 3, 5])
def test_any_number_of_blocks_is_shared_by_two_cores(count, rng, draw_problem, formula, check_cache):
    problem = draw_problem(rng, [(1, 1 + 3 * i) for i in range(count)], tokens=count)
    out, after = run(problem, PLAIN, queries=1, shares=2)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, PLAIN)) < 1e-6


@pytest.mark.parametrize(("blocks", "cores", "division"), [(64, 1, (1, 1)), (64, 2, (2, 1)), (7, 2, (1, 2))])
def test_cores_share_many_blocks_and_split_the_pages_of_few(blocks, cores, division):
    assert tpu._division(blocks, cores) == division


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
@pytest.mark.parametrize("config", [PLAIN, WINDOW, CAP], ids=str)
def test_every_mixture_of_options_gives_the_formula(
    config, dtype, queries, splits, rng, draw_problem, formula, check_cache
):
    problem = draw_problem(rng, MIXED, dtype=dtype)
    out, after = run(problem, config, queries=queries, splits=splits)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, config)) < 1e-6


@pytest.mark.full
@pytest.mark.draws(1)
def test_any_ragged_batch_gives_the_formula_and_leaves_other_pages_alone(draw_problem, formula, check_cache):
    lengths = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 13)), min_size=4, max_size=4)

    @settings(max_examples=15)
    @given(lengths, st.integers(0, 2**31 - 1))
    def holds(drawn, seed):
        problem = draw_problem(np.random.default_rng(seed), [(new, new + old) for new, old in drawn])
        out, after = run(problem, WINDOW)
        check_cache(problem, after)
        assert relative(out, formula(problem, after, WINDOW)) < 1e-6

    holds()


@pytest.mark.full
@pytest.mark.some(dtype=("float32",), head_dim=(8,))
@pytest.mark.parametrize("head_dim", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
@pytest.mark.parametrize("division", [{}, {"shares": 2}, {"splits": 3}], ids=str)
def test_no_copy_races_with_another_or_with_the_arithmetic(
    dtype, division, head_dim, rng, draw_problem, formula, check_cache, monkeypatch, watched
):
    monkeypatch.setattr(tpu, "KEYS", 4)  # up to four steps a block
    monkeypatch.setattr(tpu_write, "IN_FLIGHT", 500)  # several steps of a few groups each
    problem = draw_problem(rng, MIXED, dtype=dtype, head_dim=head_dim, sinks=True, alibi_slopes=True)
    out, after = run(problem, PLAIN, interpret=watched, **division)
    check_cache(problem, after)
    assert relative(out, formula(problem, after, PLAIN)) < 1e-6


@pytest.mark.full
def test_bfloat16_loses_no_more_than_its_rounding(rng, draw_problem, formula):
    problem = draw_problem(rng, MIXED, dtype="bfloat16", q="bfloat16")
    out, after = run(problem, PLAIN)
    assert out.dtype == jnp.bfloat16
    assert relative(out.astype(jnp.float32), formula(problem, after, PLAIN)) < 8e-3


@pytest.mark.parametrize(
    ("tokens", "sequences", "heads", "queries"),
    [(64, 64, 32, 1), (20, 64, 32, 1), (2048, 1, 32, 64), (256, 64, 32, 16), (300, 100, 8, 8), (64, 1, 4096, 1)],
)
def test_blocks_grow_with_the_rows_of_a_sequence(tokens, sequences, heads, queries):
    assert tpu._queries(jnp.zeros((tokens, heads, 1)), SimpleNamespace(sequences=sequences)) == queries


MARKS = {"decode, bfloat16, pages of 16": [pytest.mark.full], "decode, bfloat16, head_dim 64, sinks and window 128": []}


@pytest.mark.parametrize("chip", [c if c == "v5e" else pytest.param(c, marks=pytest.mark.slow) for c in KERNEL_CHIPS])
@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS.get(c.name, pytest.mark.slow)) for c in cases()], ids=str)
def test_cases_compile_and_leave_the_cache_where_it_is(case, chip, monkeypatch):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    from axon.plan.topology import devices

    monkeypatch.setattr(tpu, "KEYS", 512)
    mesh = jax.sharding.Mesh(np.array(devices(KERNEL_CHIPS[chip].topology)[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.P())
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in case.operands]
    shard = jax.shard_map(case.function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    compiled = jax.jit(shard, donate_argnums=(3, 4)).lower(*operands).compile()
    memory = compiled.memory_analysis()
    queries, *_, keys, values = (a.size * a.dtype.itemsize for a in case.operands[:5])
    assert memory.alias_size_in_bytes >= keys + values
    # Of queries there are copies, and of the scales of small pages; of the keys and values none.
    assert memory.temp_size_in_bytes < 0.75 * keys + 3 * queries
