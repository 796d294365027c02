"""The TPU kernels of attention, interpreted on a CPU, against the reference; and when they are taken."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention,
    attention_reference,
)
from axon.kernels.attention.cost import pairs
from axon.kernels.attention.forward_tiles import forward_tiles
from axon.kernels.attention.tiles import Grid, Tiles, reach
from axon.kernels.attention.tpu import attention_gradients_tpu, attention_tpu
from axon.kernels.attention.tpu_backward_grid import Spans

SMALL = Tiles(512, 256, 512, 256)
"""Of float32 operands half that: two heads of 128 queries, and 128 keys."""

MASKS = [
    Everything(),
    Causal(),
    Causal() & Window(70),
    Causal() & SameDocument(),
    Prefix(150),
    Window(140) & SameDocument(),
    Prefix(100) & SameDocument() & Window(200),
]


def draw(rng, queries=300, keys=300, heads=4, kv_heads=2, width=64, value=None, batch=2, dtype=np.float32):
    value = value or width
    shapes = (batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, value)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    documents = np.sort(rng.integers(0, 4, (batch, keys)), axis=1).astype(np.int32)
    return q, k, v, documents


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def check(rng, operands, config, inputs, tiles=SMALL, bound=3e-6, interpret=True):
    """Output, log-sum-exp and gradients of both, of float32 operands against the reference."""
    q, k, v = operands
    weights = rng.normal(size=(*q.shape[:3], v.shape[3])), rng.normal(size=q.shape[:3])

    def run(implementation, **more):
        def objective(q, k, v, sinks):
            made = implementation(q, k, v, config, inputs._replace(sinks=sinks), **more)
            made = made[0], jnp.where(jnp.isfinite(made[1]), made[1], 0)
            return sum(jnp.sum(a * w) for a, w in zip(made, weights, strict=True)), made

        chosen = (0, 1, 2) if inputs.sinks is None else (0, 1, 2, 3)
        (_, made), gradients = jax.jit(jax.value_and_grad(objective, chosen, has_aux=True))(q, k, v, inputs.sinks)
        return *made, *gradients

    ours = run(attention_tpu, tiles=tiles, interpret=interpret)
    for one, other in zip(ours, run(attention_reference), strict=True):
        assert relative(one, other) < bound


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_values_log_sum_exps_and_gradients_are_those_of_the_reference(mask, rng):
    q, k, v, documents = draw(rng)
    check(rng, (q, k, v), AttentionConfig(mask, float(rng.uniform(0.05, 0.3))), AttentionInputs((documents, documents)))


BLOCKS = Tiles(512, 1024, 512, 256)
"""Of float32 operands half that: 256 rows, and 512 keys a step, of 4 blocks of 128 or 2 of 256."""


@pytest.mark.few(mask=(Causal() & Window(200) & SameDocument(),))
@pytest.mark.parametrize(
    "mask", [Everything(), Causal(), Causal() & Window(200) & SameDocument(), Window(390), Prefix(300)], ids=str
)
def test_a_step_meets_blocks_of_keys_from_any_on_and_none_beyond_the_last(mask, rng):
    """No whole number of steps: the last step's keys begin within those of the one before."""
    q, k, v, documents = draw(rng, 200, 1200, batch=1, heads=2, kv_heads=1)
    cut = forward_tiles(BLOCKS.halved(), mask, 2, 200, 1200, 1000)
    assert 1 < cut.blocks < cut.grid.key_tiles
    assert cut.grid.key_tiles % cut.blocks
    inputs = AttentionInputs((documents[:, 1000:], documents), 1000)
    out, lse = jax.jit(lambda *o: attention_tpu(*o, AttentionConfig(mask, 0.2), inputs, tiles=BLOCKS, interpret=True))(
        q, k, v
    )
    expected = jax.jit(lambda *o: attention_reference(*o, AttentionConfig(mask, 0.2), inputs))(q, k, v)
    assert relative(out, expected[0]) < 3e-6
    assert relative(lse, expected[1]) < 3e-6


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(
    ("mask", "seq", "least"),
    [
        (Causal() & Window(128), 4096, 0.48),  # 128 keys of a window lie in two blocks of 128, whatever the tiles
        (Causal() & Window(1024), 8192, 0.8),
        (Causal(), 2048, 0.85),
        (Causal(), 8192, 0.94),
        (Everything(), 2048, 1.0),
    ],
    ids=str,
)
def test_most_pairs_that_are_computed_are_seen(mask, seq, least, group):
    cut = forward_tiles(Tiles(), mask, group, seq, seq, 0)
    assert pairs(mask, seq, seq) / cut.computed_pairs(mask) >= least


def test_computed_pairs_are_those_of_the_blocks_in_which_some_pair_is_seen(rng):
    seq, index = 1100, np.arange(1100)
    for mask in MASKS:
        cut = forward_tiles(Tiles(), mask, int(rng.integers(1, 9)), seq, seq, 0)
        allowed = mask.allowed(index[:, None], index[None], None)
        seen = np.broadcast_to(True if allowed is None else allowed, (seq, seq))
        queries, keys = (np.arange(0, seq, size) for size in (cut.grid.queries, cut.grid.keys))
        blocks = np.logical_or.reduceat(np.logical_or.reduceat(seen, queries, axis=0), keys, axis=1)
        assert cut.computed_pairs(mask) == blocks.sum() * cut.grid.queries * cut.grid.keys


SHAPES = {
    "many heads to one": {"heads": 8, "kv_heads": 1, "queries": 130, "keys": 130},
    "narrow": {"width": 96, "queries": 140, "keys": 260},
    "values narrower than keys": {"width": 192, "value": 128, "queries": 129, "keys": 200, "heads": 2},
    "wide": {"width": 256, "heads": 2, "queries": 100, "keys": 150},
    "one query": {"queries": 1, "keys": 140},
}


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_the_reference_s_values_and_gradients(name, rng):
    q, k, v, documents = draw(rng, **SHAPES[name])
    start = k.shape[1] - q.shape[1]
    check(rng, (q, k, v), AttentionConfig(MASKS[-1], 0.1), AttentionInputs((documents[:, start:], documents), start))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "features", [("cap",), ("sinks",), ("alibi_slopes",), ("cap", "sinks", "alibi_slopes")], ids="+".join
)
def test_soft_caps_sinks_and_slopes_are_the_reference_s(features, rng):
    q, k, v, documents = draw(rng, 200, 200)
    sinks = rng.normal(size=4) if "sinks" in features else None
    # Positive and at most 1, as ALiBi's are: a score of 500 would be rounded by more than the bound.
    alibi_slopes = rng.uniform(size=4) if "alibi_slopes" in features else None
    config = AttentionConfig(Causal() & SameDocument() & Window(150), 0.2, 2.0 if "cap" in features else None)
    check(rng, (q, k, v), config, AttentionInputs((documents, documents), 0, sinks, alibi_slopes))


@pytest.mark.full
def test_a_sequence_whose_gradient_does_not_fit_is_cut_into_spans(rng):
    q, k, v, _ = draw(rng, 500, 500, batch=1)
    grid = Grid.of(256, 128, 2, 500, 500)
    tiles = Tiles(512, 256, 512, 256, dq_vmem=2 * grid.rows * 128 * 4)
    assert Spans.of(grid, Causal(), 0, 64, tiles.dq_vmem) == Spans(2, 2, 2)
    check(rng, (q, k, v), AttentionConfig(Causal(), 0.2), AttentionInputs(), tiles)


@pytest.mark.full
def test_queries_may_start_at_a_traced_place(rng):
    q, k, v, _ = draw(rng, 130, 400)
    start = int(rng.integers(0, 270))
    for mask in (Causal(), Causal() & Window(90)):
        check(rng, (q, k, v), AttentionConfig(mask, 0.2), AttentionInputs(start=jnp.int32(start)))


@pytest.mark.full
@pytest.mark.few(dtype=(jnp.bfloat16,))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_floats_are_within_their_rounding_of_float64(dtype, rng):
    q, k, v, _ = draw(rng, 200, 200, batch=1)
    short = [x.astype(dtype) for x in (q, k, v)]
    attend = jax.jit(lambda *o: attention_tpu(*o, AttentionConfig(Causal(), 0.2), tiles=SMALL, interpret=True))
    out, lse = attend(*short)
    expected = attention_reference(*(np.asarray(x, np.float32) for x in short), AttentionConfig(Causal(), 0.2))
    assert out.dtype == dtype
    assert relative(out, expected[0]) < (6e-3 if dtype == jnp.bfloat16 else 8e-4)
    assert relative(lse, expected[1]) < 1e-4


@pytest.mark.full
def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(rng):
    q, k, v, documents = draw(rng, 140, 140)
    asked = documents.copy()
    asked[:, 5] = 9  # a document that no key has
    config, inputs = AttentionConfig(Causal() & SameDocument(), 0.4), AttentionInputs((asked, documents))
    run = lambda q, k, v: attention_tpu(q, k, v, config, inputs, tiles=SMALL, interpret=True)  # noqa: E731
    (out, lse), backward = jax.vjp(run, q, k, v)
    np.testing.assert_array_equal(out[:, 5], 0)
    np.testing.assert_array_equal(lse[:, 5], -np.inf)
    only_that = np.zeros_like(out)
    only_that[:, 5] = rng.normal(size=out[:, 5].shape)
    for gradient in backward((only_that, np.zeros_like(lse))):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.full
def test_no_read_is_out_of_bounds_and_no_wait_is_missing(rng, watched):
    q, k, v, documents = draw(rng, 200, 200, batch=1)
    config, inputs = (
        AttentionConfig(Causal() & SameDocument() & Window(150), 0.2),
        AttentionInputs((documents, documents)),
    )
    check(rng, (q, k, v), config, inputs, interpret=watched)


@pytest.mark.full
@pytest.mark.few(dq_tiles=(2,))
@pytest.mark.parametrize("dq_tiles", [3, 2], ids=["more steps than keys seen", "more tiles in spans than queries"])
def test_steps_without_a_tile_read_no_document(dq_tiles, rng, watched):
    """Tiles of 128 keys, the last of them seen by itself alone; spans of 2 tiles of queries where there are 3."""
    q, k, v, _ = draw(rng, 384, 384, batch=1)
    documents = np.repeat(np.int32([0, 1]), [256, 128])[None]
    tiles = Tiles(512, 256, 512, 256, dq_vmem=dq_tiles * 256 * 128 * 4)
    spans = Spans.of(Grid.of(256, 128, 2, 384, 384), Causal(), 0, 64, tiles.dq_vmem)
    assert (spans.count, spans.tiles) == ((1, 3) if dq_tiles == 3 else (2, 2))
    config, inputs = AttentionConfig(Causal() & SameDocument(), 0.2), AttentionInputs((documents, documents))
    check(rng, (q, k, v), config, inputs, tiles, interpret=watched)


@pytest.mark.full
def test_a_large_group_is_split_until_its_rows_fit(rng):
    assert [Tiles().group_parts(group) for group in (1, 8, 12, 16, 128)] == [1, 1, 2, 2, 16]
    q, k, v, _ = draw(rng, 130, 130, heads=12, kv_heads=1, batch=1)
    check(rng, (q, k, v), AttentionConfig(Causal(), 0.2), AttentionInputs())


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_that_nobody_sees_are_not_met(mask, rng):
    """The tables name exactly the tiles from the first to the last in which some pair sees each other."""
    length, size = 1000, 128
    documents = np.sort(rng.integers(0, 9, (2, length)), axis=1).astype(np.int32)
    grid = Grid.of(size, size, 1, length, length)

    @jax.jit
    def reached(documents):
        tables = reach(grid, mask, AttentionInputs((documents, documents)))
        return tables.first, tables.last

    index = np.arange(length)
    own = (documents[:, :, None], documents[:, None, :])
    seen = np.broadcast_to(
        True if (a := mask.allowed(index[:, None], index[None], own)) is None else a, (2, length, length)
    )
    rows = 2 if mask.by_document else 1
    first, last = (np.asarray(x).reshape(rows, -1) for x in reached(documents))
    for row in range(rows):
        for tile in range(grid.query_tiles):
            keys = np.flatnonzero(seen[row, tile * size : (tile + 1) * size].any(axis=0)) // size
            assert first[row, tile] == keys.min()
            assert last[row, tile] == keys.max()
            assert last[row, tile] - first[row, tile] < grid.steps(mask, 0) <= grid.steps(mask, jnp.int32(0))


@pytest.mark.parametrize(("kept", "forwards"), [((), 2), (("attention",), 1)])
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10.2's jaxpr still shows the second forward")
def test_a_remat_policy_that_keeps_attention_runs_its_forward_once(kept, forwards, rng):
    q, k, v, _ = draw(rng, 128, 128)

    def layer(q):
        return attention_tpu(jnp.sin(q), k, v, AttentionConfig(Causal(), 0.1), tiles=SMALL, interpret=True)[0]

    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(jnp.cos(jax.checkpoint(layer, policy=policy)(q)))))(q)
    assert str(jaxpr).count("name=axon_attention_forward") == forwards


@pytest.fixture
def on():
    """on(platform, **kernels): a scope whose layout is there, for choosing a kernel, not for running it."""

    def scope(platform="tpu", **kernels):
        placement = SimpleNamespace(platform=platform, explicit=True, chip="TPU v5 lite")
        return axes.activate(axes.Scope(placement, execution=axes.Execution(kernels=kernels)))

    return scope


def traced(q, k, v, mask, **more):
    return str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, mask, **more))(q, k, v))


def test_it_is_taken_on_tpus_and_never_elsewhere(rng, on):
    q, k, v, _ = draw(rng)
    for platform, taken in (("tpu", True), ("cpu", False), ("gpu", False)):
        with on(platform) as scope:
            assert ("pallas_call" in traced(q, k, v, Causal())) == taken
            assert scope.choices["attention"].startswith("tpu, causal" if taken else "xla, causal")


@pytest.mark.parametrize(
    ("shapes", "reason"), [({"width": 48}, "not 48"), ({"queries": 3}, "3 queries would leave most of a tile empty")]
)
def test_what_does_not_fit_it_takes_xla_and_says_why(shapes, reason, rng, on):
    q, k, v, _ = draw(rng, **shapes)
    with on() as scope:
        assert "pallas_call" not in traced(q, k, v, Causal())
    assert scope.choices["attention"].startswith("xla")
    assert reason in scope.choices["attention"]


def test_asked_for_by_name_it_is_taken_or_refused(rng, on):
    q, k, v, _ = draw(rng)
    with on(attention="reference") as scope:
        assert "pallas_call" not in traced(q, k, v, Causal())
        assert scope.choices["attention"] == "reference, causal (requested by name)"
    with (
        on(attention="tpu"),
        pytest.raises(UserError, match=r"'tpu' is unavailable for attention: .* not 48"),
    ):
        traced(*draw(rng, width=48)[:3], Causal())
    with (
        on("cpu", attention="tpu"),
        pytest.raises(UserError, match="is unavailable for attention: this program is for a cpu"),
    ):
        traced(q, k, v, Causal())


@pytest.mark.parametrize(
    ("length", "most", "size"), [(128, 1024, 128), (2048, 1024, 1024), (1152, 1024, 640), (100, 512, 128)]
)
def test_tiles_are_even_and_whole_lanes(length, most, size):
    grid = Grid.of(most, most, 1, length, length)
    assert grid.queries == grid.keys == size
    assert (grid.query_tiles - 1) * size < length <= grid.query_tiles * size


def test_a_start_known_at_run_time_costs_what_a_shard_does_on_average(rng):
    size, shards = int(rng.integers(5, 60)), int(rng.integers(2, 6))
    for mask in MASKS:
        each = [pairs(mask, size, size * shards, size * shard) for shard in range(shards)]
        assert pairs(mask, size, size * shards, None) == sum(each) // shards


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradients_over_parts_of_the_keys_add_up(kv_heads, rng):
    """Each part is told the log-sum-exp and D over both; against those over all keys."""
    q, k, v, documents = draw(rng, queries=200, keys=200, heads=8, kv_heads=kv_heads)
    config, cut, options = AttentionConfig(Causal() & SameDocument(), 0.4), 77, {"tiles": SMALL, "interpret": True}
    dout = rng.normal(size=q.shape).astype(np.float32)
    whole = AttentionInputs((documents, documents))
    (out, lse), backward = jax.vjp(lambda *o: attention_reference(*o, config, whole), q, k, v)
    rows = dout, lse, jnp.sum(out * dout, axis=-1)

    def part(first, last):
        of_part = AttentionInputs((documents, documents[:, first:last]), -first)
        return attention_gradients_tpu(q, k[:, first:last], v[:, first:last], config, of_part, rows, **options)

    (dq, *first), (more, *last) = part(0, cut), part(cut, 200)
    ours = dq + more, *(np.concatenate(both, axis=1) for both in zip(first, last, strict=True))
    for one, other in zip(ours, backward((dout, np.zeros_like(lse))), strict=True):
        assert relative(one, other) < 3e-6
