"""Latent attention: absorbed over its cache as expanded without one, its FLOPs, and independence of the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.kernels.attention import Causal, SameDocument, Window
from axon.layout import sequence_parallel
from axon.nn import Inputs, LatentAttention, Rope, YarnScaling, parameters
from axon.nn.flops import forward_flops

DIMS = {"embed": 16, "heads": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 10, "kv_latent": 12}
WITH_LATENT_QUERIES = DIMS | {"q_latent": 14}
ROPE = Rope(100.0, YarnScaling(8.0, 16, mscale_all_dim=0.7))
SEQUENCES, SEQ = 2, 16


def module(dims=WITH_LATENT_QUERIES, mask=Causal() & SameDocument() & Window(9)):
    return LatentAttention(dims, mask, rope=ROPE, interleaved=True)


def draw(rng):
    x = rng.normal(size=(SEQUENCES, SEQ, DIMS["embed"])).astype(np.float32)
    documents = np.sort(rng.integers(0, 3, (SEQUENCES, SEQ)), axis=1).astype(np.int32)
    return x, documents, np.tile(np.arange(SEQ, dtype=np.int32), (SEQUENCES, 1))


LAYOUTS = [
    ({"data": 2, "context": 2, "tensor": 2}, {"zero": 3, "rows": sequence_parallel()}),
    ({"data": 2, "tensor": 4}, {"zero": 3}),
    ({"tensor": 4}, {"rows": {"heads": None}}),
    ({"tensor": 8}, {"rows": {"kv_heads": None}}),
    ({"tensor": 2}, {"rows": {"heads": None, "kv_latent": "tensor", "q_latent": "tensor"}}),
    ({"data": 2, "tensor": 4}, {"rows": sequence_parallel(), "auto": True}),
    ({"context": 4}, {"context": "ring"}),
    ({"context": 2, "tensor": 2}, {"context": "ulysses", "rows": sequence_parallel()}),
    ({"context": 2, "ulysses": 2}, {"context": "usp"}),
    ({"data": 2, "context": 2, "tensor": 2}, {"context": "ulysses", "zero": 3}),
    ({"context": 2, "tensor": 2}, {"context": "ulysses", "rows": {"kv_heads": None}}),
    ({"context": 4}, {"context": "ulysses", "auto": True}),
]


@pytest.mark.full
@pytest.mark.some(layout=[layout for _, layout in LAYOUTS[::3]])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_attention_does_not_depend_on_the_layout(mesh, layout, rng, placed, compiled, bind, random_parameters):
    attention, placement = module(), placed(mesh, **layout)
    values, (x, documents, positions) = random_parameters(attention, rng), draw(rng)

    def run(stored, values, x):
        def call(values, x):
            own = shard(positions[:, stored], "batch seq"), shard(documents[:, stored], "batch seq")
            return bind(attention, values)(shard(x[:, stored], "batch seq.residual embed"), Inputs(documents, *own))[0]

        def objective(values, x):
            out = call(values, x)
            return jnp.sum(out**2), out

        gradients, out = jax.grad(objective, argnums=(0, 1), has_aux=True)(values, x)
        return out, gradients

    stored = placement.stored_positions(SEQ)
    ours = compiled(placement, lambda *given: run(stored, *given), values, x)
    theirs = jax.jit(lambda *given: run(np.arange(SEQ), *given))(values, x)
    ours = (jax.device_get(ours[0])[:, np.argsort(stored)], ours[1])
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1.0)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(mesh=[{"data": 2, "tensor": 4}], dims=(DIMS,))
@pytest.mark.parametrize("dims", [DIMS, WITH_LATENT_QUERIES], ids=["plain queries", "latent queries"])
@pytest.mark.parametrize("mesh", [None, {"tensor": 4}, {"data": 2, "tensor": 4}])
def test_over_its_cache_it_is_what_it_is_without_one(mesh, dims, seed, rng, placed, compiled, bind, random_parameters):
    """Nine tokens at once, then one by one."""
    attention = module(dims, Causal() & Window(7))
    values, (x, _, positions) = random_parameters(attention, rng), draw(rng)

    def run(values, x):
        called = bind(attention, values)
        whole, _ = called(x, Inputs(positions, positions))
        specs = attention.cache_specs(SEQUENCES, SEQ)
        cache = {name: shard(jnp.zeros(s.shape, s.dtype), " ".join(s.axes)) for name, s in specs.items()}
        start = jnp.zeros((), jnp.int32)
        first, cache = called(x[:, :9], Inputs(positions[:, :9], positions[:, :9], start=start), cache)

        def one(cache, at):
            now = jnp.broadcast_to(at, (SEQUENCES, 1))
            out, cache = called(jax.lax.dynamic_slice_in_dim(x, at, 1, 1), Inputs(now, now, start=at), cache)
            return cache, out[:, 0]

        _, others = jax.lax.scan(one, cache, jnp.arange(9, SEQ, dtype=jnp.int32))
        return whole, jnp.concatenate([first, jnp.swapaxes(others, 0, 1)], axis=1)

    whole, cached = compiled(placed(mesh), run, values, x)
    np.testing.assert_allclose(cached, whole, rtol=1e-4, atol=1e-5)


def test_a_token_takes_a_latent_and_a_rotated_key_in_the_cache_whatever_the_heads():
    (latent,) = module().cache_specs(3, 200).values()
    assert (latent.axes, latent.shape) == (
        ("batch", "_layers", "pages", "page_size", "key_latent.whole"),
        (3, 1, 3, 128, 12 + 4),
    )


def test_zero_splits_every_matrix(placed):
    placement = placed({"data": 2}, zero=3)
    for path, spec in parameters(module()).items():
        split = [a for name in spec.axes for a in placement.mesh_axes(name, "params")]
        assert split == ["data"] or len(spec.axes) == 1, path


def test_flops_are_those_of_its_matrices_and_of_two_products_of_their_own_widths(rng):
    seq = int(rng.integers(2, 64))
    matrices = sum(spec.size for spec in parameters(module()).values() if len(spec.axes) > 1)
    expected = 2 * matrices + 2 * DIMS["heads"] * (6 + 4 + 10) * seq / 2
    assert forward_flops(module(mask=Causal()), seq) == round(expected)
