"""The attention module: its formula, its cache, its FLOPs, and independence of how heads and positions are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import Attention, Inputs, RMSNorm, Rope

DIMS = {"embed": 16, "heads": 8, "kv_heads": 4, "head_dim": 4}
MASK = Causal() & SameDocument() & Window(9)
ORDER = ("data", "context", "tensor")
LAYOUTS = [
    ({"data": 2, "tensor": 4}, {}),
    ({"context": 4, "tensor": 2}, {}),
    ({"data": 2, "tensor": 4}, {"kv_heads": None}),
    ({"tensor": 8}, {"kv_heads": None}),
    ({"tensor": 4}, {"heads": None}),
    ({"tensor": 2}, {"heads": None, "kv_heads": None, "head_dim": "tensor"}),
    ({"context": 4}, {"kv_seq": "context"}),
]


def module(mask=MASK, dims=DIMS, **options):
    qk_norm = lambda heads: RMSNorm("head_dim", dims)  # noqa: E731
    return Attention(dims, mask, rope=Rope(), bias=True, out_bias=True, qk_norm=qk_norm, **options)


def run(bind, attention, values, x, documents, positions):
    """Output, and gradients of its sum of squares for `values` and `x`."""

    def call(values, x):
        inputs = Inputs(documents, shard(positions, "batch seq"), shard(documents, "batch seq"))
        return bind(attention, values)(shard(x, "batch seq embed"), inputs)[0]

    def objective(values, x):
        out = call(values, x)
        return jnp.sum(out**2), out

    gradients, out = jax.grad(objective, argnums=(0, 1), has_aux=True)(values, x)
    return out, gradients


def draw(rng, seq=16, rows=2):
    x = rng.normal(size=(rows, seq, DIMS["embed"])).astype(np.float32)
    documents = np.sort(rng.integers(0, 3, (rows, seq)), axis=1).astype(np.int32)
    return x, documents, np.tile(np.arange(seq, dtype=np.int32), (rows, 1))


def close(actual, expected, tolerance=5e-6):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= tolerance * max(np.linalg.norm(other), 1.0)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(auto=(False,))
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "rows"), LAYOUTS)
def test_attention_does_not_depend_on_how_heads_and_positions_are_split(
    mesh, rows, auto, rng, placed, compiled, bind, random_parameters
):
    attention = module(sinks=True)
    values, drawn = random_parameters(attention, rng), draw(rng)
    call = lambda values, x: run(bind, attention, values, x, *drawn[1:])  # noqa: E731
    ours = compiled(placed(mesh, rows=rows, auto=auto), call, values, drawn[0])
    close(ours, jax.jit(call)(values, drawn[0]))


@pytest.mark.full
def test_groups_that_no_share_of_the_heads_divides_get_a_key_head_each(rng, placed, compiled, bind, random_parameters):
    """12 heads of 4 groups over 8 devices do not go; over 4 devices, 3 heads each meet groups of 6 or of 4."""
    for kv_heads in (2, 3):
        attention = module(dims=DIMS | {"heads": 12, "kv_heads": kv_heads})
        values, drawn = random_parameters(attention, rng), draw(rng)
        call = lambda values, x: run(bind, attention, values, x, *drawn[1:])  # noqa: B023, E731
        ours = compiled(placed({"tensor": 4}, rows={"kv_heads": None}), call, values, drawn[0])
        close(ours, jax.jit(call)(values, drawn[0]))


def test_the_module_is_the_formula_with_dense_matrices(rng, bind, random_parameters):
    attention = Attention(DIMS, Causal(), bias=True)
    w, (x, *_) = random_parameters(attention, rng), draw(rng)
    q = np.einsum("bse,ehd->bshd", x, w["query"]) + w["query_bias"]
    k, v = (np.einsum("bse,ehd->bshd", x, w[n]) + w[f"{n}_bias"] for n in ("key", "value"))
    k, v = (np.repeat(a, 2, axis=2) for a in (k, v))
    scores = np.where(np.tri(16, dtype=bool), np.einsum("bqhd,bkhd->bhqk", q, k) / 2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    inputs = Inputs(jnp.zeros((2, 16), jnp.int32), jnp.zeros((2, 16), jnp.int32))
    close(
        jax.jit(lambda w, x: bind(attention, w)(x, inputs)[0])(w, x), np.einsum("bshd,hde->bse", mixed, w["out"]), 2e-6
    )


def empty_cache(attention, batch, length):
    specs = attention.cache_specs(batch, length)
    return {name: shard(jnp.zeros(spec.shape), " ".join(spec.axes)) for name, spec in specs.items()}


@pytest.mark.full
@pytest.mark.some(mesh=[{"data": 2, "tensor": 2}], options=[{"sinks": True}])
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.9, "soft_cap": 0.8}, {"sinks": True}], ids=["plain", "scaled and capped", "sinks"]
)
def test_a_cache_gives_token_by_token_what_the_whole_sequence_gives(
    mesh, options, rng, placed, compiled, bind, random_parameters
):
    attention = module(Causal() & Window(9), **options)
    values, (x, _, positions) = random_parameters(attention, rng), draw(rng)
    first = int(rng.integers(1, 8))

    def call(values, x):
        attend = bind(attention, values)
        whole, _ = attend(x, Inputs(positions, jnp.asarray(positions)))
        cache, parts = empty_cache(attention, 2, 20), []
        for begin, end in [(0, first), *((i, i + 1) for i in range(first, 16))]:
            at = jnp.asarray(positions[:, begin:end])
            part, cache = attend(x[:, begin:end], Inputs(at, at, start=jnp.int32(begin)), cache)
            parts.append(part)
        return whole, jnp.concatenate(parts, axis=1)

    close(*compiled(placed(mesh), call, values, x))


@pytest.mark.full
def test_a_cache_may_be_split_by_positions_of_the_queries(rng, placed, compiled, bind, random_parameters):
    attention = module(Causal())
    values, (x, _, positions) = random_parameters(attention, rng), draw(rng)

    def call(values, x):
        inputs = Inputs(positions, jnp.asarray(positions), start=jnp.int32(5))
        return bind(attention, values)(shard(x, "batch seq embed"), inputs, empty_cache(attention, 2, 32))

    ours, theirs = (compiled(placed(mesh), call, values, x) for mesh in ({"context": 4}, None))
    close(ours, theirs)


def test_a_scale_a_soft_cap_and_sinks_reach_the_scores(rng, bind, random_parameters):
    attention = Attention(DIMS, Causal(), scale=0.7, soft_cap=0.4, sinks=True)
    w, (x, *_) = random_parameters(attention, rng), draw(rng)
    q, k, v = (np.einsum("bse,ehd->bshd", x, w[n]) for n in ("query", "key", "value"))
    k, v = (np.repeat(a, 2, axis=2) for a in (k, v))
    scores = 0.4 * np.tanh(0.7 * np.einsum("bqhd,bkhd->bhqk", q, k) / 0.4)
    weights = np.exp(np.where(np.tri(16, dtype=bool), scores, -np.inf))
    total = weights.sum(-1, keepdims=True) + np.exp(w["sinks"])[:, None, None]
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / total, v)
    inputs = Inputs(jnp.zeros((2, 16), jnp.int32), jnp.zeros((2, 16), jnp.int32))
    close(
        jax.jit(lambda w, x: bind(attention, w)(x, inputs)[0])(w, x), np.einsum("bshd,hde->bse", mixed, w["out"]), 2e-6
    )


@pytest.mark.parametrize("seq", [1, 8, 33])
@pytest.mark.parametrize("window", [None, 1, 7, 32, 100])
def test_flops_count_the_projections_and_the_keys_that_a_query_sees(seq, window):
    mask = Causal() & SameDocument() if window is None else Causal() & SameDocument() & Window(window)
    projections = 2 * (2 * 16 * 8 * 4 + 2 * 16 * 4 * 4)
    keys = sum(1 for q in range(seq) for k in range(seq) if k <= q and (window is None or k > q - window)) / seq
    assert module(mask).flops(seq) == projections + round(4 * 8 * 4 * min(keys, seq / 2))


def test_biases_are_never_decayed():
    attention = module()
    assert not attention.query_bias.decay
    assert not attention.key_bias.decay
    assert not attention.value_bias.decay
    assert attention.query.decay
