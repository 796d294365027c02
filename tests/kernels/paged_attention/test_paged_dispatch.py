"""paged_attention(): which implementation runs and why, and what it says to arrays that do not fit each other."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.kernels.paged_attention import Cache, paged_attention, paged_attention_tables
from axon.kernels.paged_attention.ragged import AttentionConfig


def operands(
    *,
    heads=4,
    kv_heads=2,
    head_dim=8,
    page_size=4,
    dtype="float32",
    sequences=3,
    columns=4,
    q="float32",
    tokens=6,
    **given,
):
    rows = [jnp.zeros((tokens, count, head_dim), q) for count in (heads, kv_heads, kv_heads)]
    names = ("q", "k", "v", "cache", "kv_lens", "page_table", "cu_q_lens", *given)
    cache = Cache.empty(1 + sequences * columns, kv_heads, page_size, head_dim, dtype)
    table = jnp.arange(1, 1 + sequences * columns, dtype=jnp.int32).reshape(sequences, columns)
    lens = jnp.full(sequences, 2, jnp.int32)
    bounds = jnp.arange(sequences + 1, dtype=jnp.int32) * 2
    return dict(zip(names, (*rows, cache, lens, table, bounds, *given.values()), strict=True))


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


PLAIN = Cache.empty(13, 2, 4, 8, "float32")
INT8 = Cache.empty(13, 2, 4, 8, "int8")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": zeros(6, 32)}, r"q is tokens heads head_dim, not of shape \(6, 32\)"),
        ({"q": zeros(5, 4, 8)}, "5 rows of queries, but 6 of new keys"),
        ({"q": zeros(6, 5, 8)}, "5 heads are not a multiple of 2 kv_heads"),
        ({"q": zeros(6, 4, 16)}, "queries have head_dim 16, keys 8"),
        ({"q": zeros(0, 4, 8), "k": zeros(0, 2, 8), "v": zeros(0, 2, 8)}, "no rows; give one padding row at least"),
        ({"v": zeros(6, 2, 4)}, r"k and v differ in shape: \(6, 2, 8\) and \(6, 2, 4\)"),
        ({"cache": Cache.empty(13, 4, 4, 8, "float32")}, r"\(2, 8\), the cache's are \(4, 8\)"),
        ({"cache": Cache(PLAIN.keys, INT8.values)}, r"keys are float32\(13, 2, 4, 8\), its values int8"),
        ({"cache": Cache(PLAIN.keys[0], PLAIN.values[0])}, "a cache's keys are pages kv_heads page_size head_dim"),
        ({"cache": Cache(INT8.keys, INT8.values)}, r"an? int8 cache has float32\(13, 2, 4\) key_scales, not None"),
        ({"cache": Cache(PLAIN.keys, PLAIN.values, INT8.key_scales)}, "a float32 cache has no key_scales"),
        ({"kv_lens": zeros(2, dtype=jnp.int32)}, "2 kv_lens, but 3 rows of page_table"),
        ({"kv_lens": zeros(3)}, "kv_lens is float32; int32 was expected"),
        ({"page_table": zeros(12, dtype=jnp.int32)}, r"page_table has shape \(12,\); 2 dimensions were expected"),
        ({"page_table": zeros(3, 0, dtype=jnp.int32)}, "no sequence has room for a page"),
        ({"cu_q_lens": zeros(3, dtype=jnp.int32)}, "3 kv_lens want 4 cu_q_lens, not 3"),
        ({"sinks": zeros(3)}, r"sinks are of shape \(3,\); there are 4 heads, one number each"),
        ({"distance_bias": zeros(4, 16)}, r"distance_bias is of shape \(4, 16\); must be \(4, 31\), for 4 heads"),
        ({"window": 0}, "window is 0; a query sees at least itself"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; give a number above 0"),
        ({"alibi_slopes": zeros(3)}, r"alibi_slopes are of shape \(3,\); there are 4 heads, one number each"),
    ],
)
def test_what_does_not_fit_is_said_with_its_numbers(changed, message):
    with pytest.raises(UserError, match=message):
        paged_attention(**(operands() | changed))


def test_a_cache_needs_a_page_beside_paddings():
    with pytest.raises(UserError, match=r"1 pages of 2 kv_heads .* give 2 pages or more"):
        Cache.empty(1, 2, 4, 8, "float32")


def scope(platform, chip="", **kernels):
    placement = SimpleNamespace(platform=platform, chip=chip, explicit=True)
    return axes.activate(axes.Scope(placement, execution=axes.Execution(kernels=kernels)))


def notice(platform, arguments, **kernels):
    with scope(platform, **kernels) as active:
        options = {"window": arguments.pop("window", None)}
        jaxpr = jax.make_jaxpr(lambda arrays: paged_attention(**arrays, **options))(arguments)
        assert ("pallas_call" in str(jaxpr)) == active.choices["paged_attention"].startswith("tpu")
    return active.choices["paged_attention"]


FITTING = {"head_dim": 128, "page_size": 16, "dtype": "bfloat16", "q": "bfloat16"}


@pytest.mark.parametrize(
    ("platform", "kernels", "chosen"),
    [
        ("cpu", {}, "xla, bfloat16 pages of 16"),
        (
            "gpu",
            {},
            "xla, bfloat16 pages of 16 (not mosaic: it is for Hopper GPUs, and this is ; "
            "not tpu: this program is for a gpu)",
        ),
        ("tpu", {}, "tpu, bfloat16 pages of 16"),
        ("tpu", {"paged_attention": "xla"}, "xla, bfloat16 pages of 16 (requested by name)"),
        ("cpu", {"paged_attention": "reference"}, "reference, bfloat16 pages of 16 (requested by name)"),
    ],
)
def test_the_platform_or_the_name_decides(platform, kernels, chosen):
    assert notice(platform, operands(**FITTING), **kernels) == chosen


@pytest.mark.parametrize(("page_size", "said"), [(64, True), (128, False)])
def test_quantised_pages_whose_scales_fill_no_row_of_lanes_are_said_to_cost_a_copy(page_size, said):
    arguments = operands(**(FITTING | {"dtype": "int8", "page_size": page_size}))
    assert ("lays out anew" in notice("tpu", arguments)) == said


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 80}, "the kernel needs a head_dim of 64, 96, 128 or 256, not 80"),
        ({"page_size": 8}, "with head_dim 128 the kernel needs pages whose size 16 divides, not 8"),
        ({"page_size": 64, "head_dim": 96}, "with head_dim 96 the kernel needs pages whose size 128 divides, not 64"),
        ({"q": "float16"}, "the kernel needs queries of bfloat16 or float32, not float16"),
        ({"distance_bias": zeros(4, 127)}, "the kernel adds no bias by distance to the scores"),
        ({"sequences": 4, "columns": 40_000, "page_size": 16, "kv_heads": 1}, "a page table of 640,000 bytes"),
    ],
)
def test_what_the_kernel_lacks_takes_xla_with_the_reason_and_raises_only_by_name(changed, reason, monkeypatch):
    monkeypatch.setattr(Cache, "empty", lambda *args: jax.eval_shape(lambda: EMPTY(*args)))
    arguments = operands(**(FITTING | changed))
    said = notice("tpu", dict(arguments))
    assert said.startswith("xla")
    assert reason in said
    with scope("tpu", paged_attention="tpu"), pytest.raises(UserError, match=reason):
        jax.eval_shape(lambda arrays: paged_attention(**arrays), arguments)


EMPTY = Cache.empty


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 64, "page_size": 128, "sinks": zeros(4)},  # gpt-oss
        {"head_dim": 96, "page_size": 128, "alibi_slopes": zeros(4)},
    ],
)
def test_narrow_heads_with_sinks_or_slopes_are_the_kernels(changed):
    assert notice("tpu", operands(**(FITTING | changed))) == "tpu, bfloat16 pages of 128"


@pytest.mark.parametrize(("chip", "grid"), [("TPU v5 lite", (1, 3)), ("TPU v5", (2, 3)), ("TPU v4", (2, 3))])
def test_both_cores_of_a_chip_have_work(chip, grid):
    with scope("tpu", chip):
        jaxpr = jax.make_jaxpr(lambda arrays: paged_attention(**arrays))(operands(**FITTING, columns=1, tokens=3))
    *_, attend = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    assert attend.params["grid_mapping"].grid == grid


@pytest.mark.full
def test_tables_made_before_a_call_give_what_it_makes_itself(rng, draw_problem):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)])
    ragged = (problem.inputs.kv_lens, problem.inputs.page_table, problem.inputs.cu_q_lens)
    tables = paged_attention_tables(problem.q, problem.cache, *ragged)
    arguments = (problem.q, problem.k, problem.v, problem.cache, *ragged)
    ours, theirs = paged_attention(*arguments, tables=tables), paged_attention(*arguments)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with scope("cpu", paged_attention="reference"):
        assert paged_attention_tables(problem.q, problem.cache, *ragged) is None


def test_a_kernel_of_another_platform_is_not_to_be_had_by_name():
    with scope("cpu", paged_attention="tpu"), pytest.raises(UserError, match="this program is for a cpu"):
        paged_attention(**operands(**FITTING))


def test_the_options_reach_the_implementation_and_are_said(rng, draw_problem, formula):
    problem = draw_problem(rng, [(1, 9), (6, 6), (3, 14)])
    ragged = (problem.inputs.kv_lens, problem.inputs.page_table, problem.inputs.cu_q_lens)
    with scope("cpu") as active:
        attend = jax.jit(lambda *arrays: paged_attention(*arrays, window=5, soft_cap=1.5))
        out, after = attend(problem.q, problem.k, problem.v, problem.cache, *ragged)
    assert active.choices["paged_attention"] == "xla, float32 pages of 4, window 5, soft cap 1.5"
    expected = formula(problem, after, AttentionConfig(8**-0.5, window=5, soft_cap=1.5))
    np.testing.assert_allclose(out, expected, atol=1e-5)
