"""Stack: scanned or written out, with whatever is recomputed, the same function and gradients."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axon.axes import einsum, shard
from axon.errors import UserError
from axon.nn import Dropout, Inputs, Param, Stack
from axon.nn.stack import REMAT_NAMES
from models.gpt2 import GPT2
from models.llama import Llama

DIMS = {"embed": 8, "mlp": 16}
UP, DOWN = "batch seq embed, embed mlp -> batch seq mlp", "batch seq mlp, mlp embed -> batch seq embed"


class Block(nnx.Module):
    """Nonlinear, with a named activation, dropout, something shared, and a memory that counts."""

    remat_names = ("up",)

    def __init__(self, rate=0.0):
        self.up, self.down = Param("embed mlp", DIMS), Param("mlp embed", DIMS)
        self.dropout = Dropout(rate, "block")

    def __call__(self, x, inputs, shared, memory=None):
        h = checkpoint_name(einsum(UP, x, self.up), "up")
        out = self.dropout(einsum(DOWN, jnp.tanh(h) * shared, self.down), inputs)
        return x + out, None if memory is None else memory + jnp.sum(h)


@pytest.fixture
def run(rng, seed, bind, random_parameters):
    """run(**options): output, memory, and gradients, of three blocks with the same parameters each time."""
    x = rng.normal(size=(2, 4, 8)).astype(np.float32)
    values = random_parameters(Stack(Block(), 3), rng)

    def call(memory=True, rate=0.0, **options):
        stack = Stack(Block(rate), 3, **options)
        ids = jnp.zeros((2, 4), jnp.int32)
        inputs = Inputs(ids, ids, key=jax.random.key(seed), rows=jnp.arange(2, dtype=jnp.int32))

        def out(values, x):
            return bind(stack, values)(
                shard(x, "batch seq embed"), inputs, 1.5, memory=jnp.arange(3.0) if memory else None
            )

        gradients = jax.grad(lambda v, x: jnp.sum(out(v, x)[0] ** 2), argnums=(0, 1))
        return jax.jit(lambda v, x: (out(v, x), gradients(v, x)))(values, x)

    return call


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1.0)


def test_scanned_and_written_out_are_the_same(run):
    close(run(unroll=False, rate=0.3), run(unroll=True, rate=0.3))
    close(run(unroll=False, memory=False), run(unroll=True, memory=False))


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("remat", ["full", "minimal", ("up",), ()])
def test_what_is_recomputed_does_not_change_gradients(remat, unroll, run):
    close(run(remat=remat, unroll=unroll), run(unroll=unroll))


def test_each_layer_has_its_own_parameters_and_memory(run):
    (_, memory), _ = run()
    assert len(np.unique(np.asarray(memory))) == 3


def test_no_two_layers_drop_the_same_elements(seed):
    class Drop(nnx.Module):
        def __init__(self):
            self.scale, self.dropout = Param("embed", DIMS), Dropout(0.5, "here")

        def __call__(self, x, inputs, memory):
            return x, self.dropout(jnp.ones((2, 4, 8)), inputs)

    stack = nnx.merge(nnx.split(Stack(Drop(), 3), Param)[0], {"block": {"scale": jnp.ones((3, 8))}})
    ids = jnp.zeros((2, 4), jnp.int32)
    inputs = Inputs(ids, ids, key=jax.random.key(seed), rows=jnp.arange(2, dtype=jnp.int32))
    _, kept = stack(jnp.ones(()), inputs, memory=jnp.zeros(3))
    assert not np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[1], kept[2])


def test_the_named_activation_is_kept_and_the_rest_is_not(rng, bind, random_parameters):
    stack = lambda remat: Stack(Block(), 2, remat, unroll=True)  # noqa: E731
    values = random_parameters(stack("none"), rng)
    x, ids = jnp.ones((2, 4, 8)), jnp.zeros((2, 4), jnp.int32)

    def kept(remat):
        call = lambda v: bind(stack(remat), v)(x, Inputs(ids, ids), 1.5)[0]  # noqa: E731
        shapes = []
        jax.jit(lambda v: shapes.extend(a.shape for a in jax.tree.leaves(jax.vjp(call, v)[1]))).lower(values)
        return shapes.count((2, 4, 16))

    assert kept("full") == 0
    assert kept(("up",)) == 2
    assert kept("minimal") == 2
    assert kept("none") > 2


def test_two_layouts_on_one_mesh_each_get_their_own_trace(rng, placed, compiled, random_parameters, bind):
    """`checkpoint` and `scan` cache what they trace: a layout must not see another's."""
    stack = Stack(Block(), 2, "full", unroll=False)
    values, ids = random_parameters(stack, rng), jnp.zeros((2, 4), jnp.int32)
    for row in ("tensor", None, "tensor"):
        seen = []

        def run(values, x):
            out, _ = bind(stack, values)(shard(x, "batch seq embed"), Inputs(ids, ids), 1.5)
            return shard(out, "batch seq embed")

        placement = placed({"data": 2, "tensor": 2}, rows={"embed": row, "mlp": None})
        out = compiled(placement, run, values, np.ones((2, 4, 8), np.float32))
        seen = out.addressable_shards[0].data.shape
        assert seen == (1, 4, 4 if row else 8)


def test_few_layers_are_written_out_on_cpu_and_many_scanned(rng, placed, compiled, random_parameters, bind):
    from axon import axes

    for layers, word in ((2, "written out"), (17, "scanned")):
        stack, ids = Stack(Block(), layers), jnp.zeros((2, 4), jnp.int32)
        values, told = random_parameters(stack, rng), []

        def run(values):
            out, _ = bind(stack, values)(jnp.ones((2, 4, 8)), Inputs(ids, ids), 1.5)  # noqa: B023
            told.append(axes.current().choices["layers"])  # noqa: B023
            return out

        compiled(placed(), run, values)
        assert told == [f"{layers} blocks {word}, remat none"]


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("ful", "remat 'ful' is no policy. Did you mean 'full'?"),
        (("uq",), "no activation is named 'uq'. Known: up."),
        (("up", "gate"), "no activation is named 'gate'. Known: up."),
    ],
)
def test_an_unknown_policy_or_name_is_refused(remat, message):
    with pytest.raises(UserError) as caught:
        Stack(Block(), 2, remat)
    assert message in str(caught.value)


CONFIGS = {
    "llama": Llama(vocab=32, embed=16, layers=2, heads=2, kv_heads=1, mlp=24),
    "gpt2": GPT2(vocab=32, embed=16, layers=2, heads=2, mlp=24, positions=8),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_keeps_by_name_what_its_blocks_name_and_nothing_else(config, rng, bind, random_parameters):
    model = config.build()
    values, ids = random_parameters(model, rng), jnp.asarray(rng.integers(0, 32, (2, 8)), jnp.int32)
    inputs = Inputs(ids, jnp.broadcast_to(jnp.arange(8), (2, 8)))
    traced = str(jax.make_jaxpr(lambda v: bind(model, v).hidden(inputs)[0])(values))
    named = set(re.findall(r"name\[name=(\w+)\]", traced))
    for name in REMAT_NAMES:
        kept = dataclasses.replace(config, remat=(name,))
        if name in named:
            kept.build()
        else:
            with pytest.raises(UserError, match=f"remat: no activation is named {name!r}. Known: "):
                kept.build()
    assert named == set(REMAT_NAMES) - ({"gate"} if isinstance(config, GPT2) else set())
