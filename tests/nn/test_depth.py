"""Depth: segments scanned or unrolled, with whatever is recomputed, the same function and gradients."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes import einsum, shard
from axon.errors import UserError
from axon.kernels.attention import Causal
from axon.nn import Attention, Auxiliary, CacheSpec, Depth, Dropout, Inputs, Param, Rope, Segment
from axon.runtime.execution import check_execution
from models.gpt2 import GPT2
from models.llama import Llama

UP, DOWN = "batch seq embed, embed mlp -> batch seq mlp", "batch seq mlp, mlp embed -> batch seq embed"


class Block(nnx.Module):
    """Nonlinear, with a named activation, dropout, a cache that counts, a loss and a statistic."""

    remat_names = ("up",)

    def __init__(self, bend=jnp.tanh, rate=0.0, mlp=16):
        dims = {"embed": 8, "mlp": mlp}
        self.up, self.down = Param("embed mlp", dims), Param("mlp embed", dims)
        self.bend, self.dropout = bend, Dropout(rate, "block")

    def __call__(self, x, inputs, cache=None):
        h = checkpoint_name(einsum(UP, x, self.up), "up")
        x = x + self.dropout(einsum(DOWN, self.bend(h), self.down), inputs)
        cache = cache and {"count": cache["count"] + jnp.sum(h, axis=(1, 2))}
        return x, cache, Auxiliary({"size": jnp.sum(h**2)}, {"load/bias": jnp.sum(h, axis=(0, 1))})

    def cache_specs(self, batch, length):
        return {"count": CacheSpec(("batch",), (batch,), cache_kind="state")}


def plain_depth(rate=0.0):
    return Depth(Segment(3, block=Block(rate=rate)))


def mixed_depth(rate=0.0):
    """A layer, two periods of two kinds, two layers of a fourth kind: 0; 1, 3 and 2, 4; 5, 6."""
    return Depth(
        Segment(1, first=Block(jnp.cos, rate)),
        Segment(2, local=Block(jnp.tanh, rate), full=Block(jnp.sin, rate, mlp=24)),
        Segment(2, last=Block(jnp.tanh, rate)),
    )


ORDER = [("first", 0), ("local", 0), ("full", 0), ("local", 1), ("full", 1), ("last", 0), ("last", 1)]


def one_by_one(bind, values, x, inputs, cache):
    """What `mixed_depth` is: its blocks, each with its own parameters and cache, in the order of logical layers."""
    blocks = {"first": Block(jnp.cos), "local": Block(), "full": Block(jnp.sin, mlp=24), "last": Block()}
    new, losses, statistics = {}, 0, {}
    for kind, i in ORDER:
        own = jax.tree.map(lambda v, i=i: v[i], (values[kind], cache[kind]))
        x, one, auxiliary = bind(blocks[kind], own[0])(x, inputs, own[1])
        new.setdefault(kind, []).append(one["count"])
        statistics.setdefault(f"{kind}/load/bias", []).append(auxiliary.statistics["load/bias"])
        losses += auxiliary.losses["size"]
    stacked = {kind: {"count": jnp.stack(each)} for kind, each in new.items()}
    return x, stacked, Auxiliary({"size": losses}, {path: jnp.stack(each) for path, each in statistics.items()})


@pytest.fixture(scope="module")
def run(bind, random_parameters, executed, shared_seed):
    """run(depth, call, **fields): output, cache, auxiliary and gradients by an `Execution` with these fields, with the
    same parameters for the same kinds."""
    rng = np.random.default_rng(shared_seed)
    x = rng.normal(size=(2, 4, 8)).astype(np.float32)
    ids, drawn = jnp.zeros((2, 4), jnp.int32), {}

    def run(depth, call=None, with_cache=True, **fields):
        names = tuple(depth.blocks)
        values = drawn.setdefault(names, random_parameters(depth, rng))
        inputs = Inputs(ids, ids, key=jax.random.key(shared_seed), sequences=jnp.arange(2, dtype=jnp.int32))
        specs = depth.cache_specs(2, 4)
        cache = {kind: {n: np.ones(s.shape, np.float32) for n, s in each.items()} for kind, each in specs.items()}

        def out(values, x):
            x = shard(x, "batch seq embed")
            given = cache if with_cache else None
            return bind(depth, values)(x, inputs, given) if call is None else call(values, x, inputs, given)

        def objective(values, x):
            x, cache, auxiliary = out(values, x)
            return jnp.sum(x**2) + auxiliary.losses["size"], (x, cache, auxiliary)

        with executed(**fields):
            gradients, found = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(values, x)
        return jax.device_get((found, gradients))

    return run


@pytest.fixture(scope="module")
def of_blocks(run, bind):
    """What `mixed_depth`'s blocks make, one by one."""
    return run(mixed_depth(), lambda *given: one_by_one(bind, *given))


@pytest.fixture(scope="module")
def of_mixed(run):
    """of_mixed(unroll): what `mixed_depth` makes."""
    return cache(lambda unroll: run(mixed_depth(), unroll=unroll))


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1.0)


@pytest.mark.parametrize("unroll", [False, True])
def test_segments_of_several_kinds_are_their_blocks_one_by_one_in_logical_order(unroll, of_mixed, of_blocks):
    close(of_mixed(unroll), of_blocks)


@pytest.mark.few(make=(plain_depth,), with_cache=(False,))
@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("make", [plain_depth, mixed_depth])
def test_scanned_and_unrolled_are_the_same(run, make, with_cache):
    scanned, unrolled = (run(make(rate=0.3), with_cache=with_cache, unroll=unroll) for unroll in (False, True))
    close(scanned, unrolled)


@pytest.mark.few(unroll=(False,), remat=("full", {"full": "full", "last": ("up",)}))
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("remat", ["full", "minimal", ("up",), (), {"full": "full", "last": ("up",)}])
def test_what_is_recomputed_does_not_change_gradients_cache_or_auxiliary(remat, unroll, run, of_mixed):
    close(run(mixed_depth(), remat=remat, unroll=unroll), of_mixed(unroll))


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_segment_in_parts_is_the_whole_and_a_place_without_a_layer_adds_nothing(run, bind):
    def depth():
        return Depth(Segment(3, local=Block(rate=0.3), full=Block(jnp.sin, mlp=24)))

    def in_parts(values, x, inputs, cache):
        found = []
        for numbers, present in ((jnp.array([0, 1]), None), (jnp.array([2, -1]), jnp.array([True, False]))):
            part = bind(depth(), jax.tree.map(lambda v, places=numbers: v[places], values))
            x, auxiliary = part.part(x, inputs, [numbers], [present])
            found.append(auxiliary)
        losses = {"size": sum(one.losses["size"] for one in found)}
        in_places = jax.tree.map(lambda *each: jnp.concatenate(each), *(one.statistics for one in found))
        statistics = jax.tree.map(lambda s: s[:3] + jnp.sum(s[3:]), in_places)
        return x, None, Auxiliary(losses, statistics)

    close(run(depth(), in_parts, unroll=False), run(depth(), with_cache=False, unroll=False))


def test_each_layer_has_its_own_parameters_and_cache(run):
    (_, cache, _), _ = run(plain_depth())
    assert len(np.unique(np.asarray(cache["block"]["count"]))) == 6


def test_parameters_know_the_logical_layers_of_their_stack():
    layers = {kind: block.up.layers for kind, block in mixed_depth().blocks.items()}
    assert layers == {"first": (0,), "local": (1, 3), "full": (2, 4), "last": (5, 6)}
    assert mixed_depth().num_layers == 7


def test_no_two_layers_drop_the_same_elements(seed, executed):
    class Drop(nnx.Module):
        def __init__(self):
            self.scale, self.dropout = Param("embed", {"embed": 8}), Dropout(0.5, "here")

        def __call__(self, x, inputs, cache=None):
            return x, {"dropped": self.dropout(jnp.ones((2, 4, 8)), inputs)}, Auxiliary()

        def cache_specs(self, batch, length):
            return {"dropped": CacheSpec(("batch",), (batch,), cache_kind="state")}

    depth = Depth(Segment(2, one=Drop(), other=Drop()))
    values = {kind: {"scale": jnp.ones((2, 8))} for kind in depth.blocks}
    ids = jnp.zeros((2, 4), jnp.int32)
    inputs = Inputs(ids, ids, key=jax.random.key(seed), sequences=jnp.arange(2, dtype=jnp.int32))
    with executed(unroll=False):
        _, dropped, _ = nnx.merge(nnx.graphdef(depth), values)(
            jnp.ones(()), inputs, {kind: {"dropped": jnp.zeros(2)} for kind in depth.blocks}
        )
    masks = np.concatenate([dropped[kind]["dropped"] for kind in depth.blocks]).reshape(4, -1)
    assert len(np.unique(masks, axis=0)) == 4


@pytest.fixture
def saved(rng, bind, random_parameters, executed):
    """saved(depth, width, **fields): how many arrays `batch seq width` the backward keeps of its unrolled layers."""
    return partial(_saved, rng, bind, random_parameters, executed)


def _saved(rng, bind, random_parameters, executed, depth, width, **fields):
    values, x, ids = random_parameters(depth, rng), jnp.ones((2, 4, 8)), jnp.zeros((2, 4), jnp.int32)
    shapes = []

    def forward(values):
        return bind(depth, values)(x, Inputs(ids, ids))[0]

    with executed(unroll=True, **fields):
        jax.jit(lambda v: shapes.extend(a.shape for a in jax.tree.leaves(jax.vjp(forward, v)[1]))).lower(values)
    return shapes.count((2, 4, width))


def test_the_named_activation_is_kept_and_the_rest_is_not(saved):
    kept = {remat: saved(plain_depth(), 16, remat=remat) for remat in ("full", ("up",), "minimal")}
    assert kept == {"full": 0, ("up",): 3, "minimal": 3}
    assert saved(plain_depth(), 16) > 3


def test_each_kind_is_recomputed_by_its_own_policy(saved):
    def kept(remat):
        depths = (Depth(Segment(2, local=Block(), full=Block(mlp=24))) for _ in range(2))
        return [saved(depth, width, remat=remat) for depth, width in zip(depths, (16, 24), strict=True)]

    assert kept({"local": "full", "full": ("up",)}) == [0, 2]
    assert kept({"local": ("up",), "full": "full"}) == [2, 0]
    assert kept({"full": "full"})[0] > 2


def test_two_layouts_on_one_mesh_each_get_their_own_trace(rng, placed, compiled, random_parameters, bind):
    """`checkpoint` and `scan` cache what they trace: a layout must not see another's."""
    depth, execution = plain_depth(), axes.Execution(remat="full", unroll=False)
    values, ids = random_parameters(depth, rng), jnp.zeros((2, 4), jnp.int32)
    for row in ("tensor", None, "tensor"):

        def run(values, x):
            out, *_ = bind(depth, values)(shard(x, "batch seq embed"), Inputs(ids, ids))
            return shard(out, "batch seq embed")

        placement = placed({"data": 2, "tensor": 2}, rows={"embed": row, "mlp": None})
        out = compiled(placement, run, values, np.ones((2, 4, 8), np.float32), execution=execution)
        assert out.addressable_shards[0].data.shape == (1, 4, 4 if row else 8)


def test_few_layers_are_unrolled_on_cpu_and_many_scanned_and_it_is_said(placed):
    def said(depth, remat="none"):
        ids = jnp.zeros((2, 4), jnp.int32)
        with axes.activate(axes.Scope(placed(), execution=axes.Execution(remat=remat))) as scope:
            nnx.eval_shape(lambda: depth(jnp.ones((2, 4, 8)), Inputs(ids, ids)))
        return scope.choices["layers"]

    few, many = (Depth(Segment(n, block=Drawn())) for n in (2, 17))
    assert said(few) == "2 × block unrolled, remat none"
    assert said(many) == "17 × block scanned, remat none"
    both = Depth(Segment(9, local=Drawn(), full=Drawn()), Segment(1, last=Drawn()))
    text = said(both, remat={"full": "full", "local": "full"})
    assert text == "9 × local + full scanned, 1 × last unrolled, remat full of local, full of full, none of last"


class Drawn(nnx.Module):
    """A block without parameters."""

    def __call__(self, x, inputs, cache=None):
        return x, cache, Auxiliary()


def test_segments_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"two .*'block'"):
        Depth(Segment(1, block=Block()), Segment(1, block=Block()))
    with pytest.raises(UserError, match="named 'part'"):
        Depth(Segment(1, part=Block()))
    with pytest.raises(UserError, match="1 kinds of block, 0 times"):
        Segment(0, block=Block())
    with pytest.raises(UserError, match=r"1000000000 times; .* 65536"):
        Segment(10**9, block=Block())
    with pytest.raises(UserError, match="no segments"):
        Depth()
    shared = Block()
    with pytest.raises(UserError, match=r"Block .*elsewhere"):
        Depth(Segment(2, one=shared, other=shared))


@pytest.mark.parametrize(("result", "found"), [(lambda x: x, "one array"), (lambda x: (x, None), "2 values")])
def test_a_block_that_returns_something_else_is_named(result, found):
    class Mistaken(nnx.Module):
        def __call__(self, x, inputs, cache=None):
            return result(x)

    ids = jnp.zeros((2, 4), jnp.int32)
    message = rf"Mistaken \(.*\), the block of kind 'odd', returned {found}: .*axon.nn.Auxiliary"
    with pytest.raises(UserError, match=message):
        Depth(Segment(2, odd=Mistaken()))(jnp.ones((2, 4, 8)), Inputs(ids, ids))


CONFIGS = {
    "llama": (Llama(vocab=32, embed=16, layers=2, heads=2, kv_heads=1, mlp=24), {"gate", "inverse_rms"}),
    "gpt2": (GPT2(vocab=32, embed=16, layers=2, heads=2, mlp=24, positions=8), set()),
}


@pytest.mark.parametrize(("config", "more"), CONFIGS.values(), ids=CONFIGS)
def test_a_model_keeps_by_name_what_its_blocks_name_and_nothing_else(config, more, rng, bind, random_parameters):
    model = config.build()
    values, ids = random_parameters(model, rng), jnp.asarray(rng.integers(0, 32, (2, 8)), jnp.int32)
    inputs = Inputs(ids, jnp.broadcast_to(jnp.arange(8), (2, 8)))
    traced = str(jax.make_jaxpr(lambda v: bind(model, v).hidden(inputs)[0])(values))
    named = set(re.findall(r"name\[name=(\w+)\]", traced))
    assert named == {"query", "key", "value", "attention", "residual", "up"} | more
    check_execution(axes.Execution(remat=tuple(named)), model)
    with pytest.raises(UserError, match="no activation is named 'logits'"):
        check_execution(axes.Execution(remat=("logits",)), model)


@pytest.mark.parametrize("unroll", [False, True])
def test_the_angles_of_each_rope_are_computed_once_however_many_layers_use_them(
    unroll, rng, bind, random_parameters, executed
):
    class Attends(nnx.Module):
        def __init__(self, rope):
            dims = {"embed": 8, "heads": 2, "kv_heads": 2, "head_dim": 4}
            self.attention = Attention(dims, Causal(), rope=rope)

        def __call__(self, x, inputs, cache=None):
            out, cache = self.attention(x, inputs, cache)
            return x + out, cache, Auxiliary()

    kinds = {"local": Attends(Rope(100.0)), "full": Attends(Rope(1e6)), "third": Attends(Rope(100.0))}
    depth = Depth(Segment(4, **kinds))
    values, ids = random_parameters(depth, rng), jnp.zeros((2, 4), jnp.int32)
    loss = lambda v: jnp.sum(bind(depth, v)(jnp.ones((2, 4, 8)), Inputs(ids, ids))[0] ** 2)  # noqa: E731
    with executed(unroll=unroll, remat="full"):
        assert str(jax.make_jaxpr(jax.grad(loss))(values)).count("= sin ") == 2
