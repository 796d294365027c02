"""TokenAssignments of tokens, sent to their experts and back: what each way does to any load, and what it may hold."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.parallel.expert import ExpertMesh, Matrix, Padded, Products
from axon.parallel.expert.rounds import num_rounds

EXPERTS, TOKENS, K, EMBED = 8, 12, 2, 3
LOADS = ("random", "one", "own", "none", "skewed")


def drawn(rng, load, devices):
    """`devices tokens·k`: an expert of each copy."""
    shape = devices, TOKENS * K
    return {
        "random": lambda: rng.integers(0, EXPERTS, shape),
        "one": lambda: np.full(shape, rng.integers(EXPERTS)),
        "own": lambda: np.arange(devices)[:, None] * (EXPERTS // devices) + np.zeros(shape),
        "none": lambda: np.where(rng.random(shape) < 0.5, -1, rng.integers(0, EXPERTS, shape)),
        "skewed": lambda: np.minimum(rng.geometric(0.4, shape) - 1, EXPERTS - 1),
    }[load]().astype(np.int32)


@pytest.mark.few(devices=(1, 4))
@pytest.mark.parametrize(("name", "devices"), [("local", 1), *itertools.product(("padded", "ragged"), (2, 4, 8))])
def test_every_copy_reaches_its_expert_once_and_comes_back(name, devices, ways, rng, placed):
    """Over all rounds and with any load; rows are sorted by expert, those of no copy are beyond the sizes."""
    placement = placed({"expert": devices})
    with jax.set_mesh(placement.mesh):
        mesh = ExpertMesh.of(axes.Scope(placement), EXPERTS)
        way = ways[name](mesh, TOKENS * K, 1.0)

        def rounds(chosen, x):
            def one(number):
                plan = way.plan(chosen[0], number)
                rows = way.send(x[0], plan)
                experts = jnp.repeat(
                    jnp.arange(mesh.local), plan.sizes, total_repeat_length=way.num_rows
                ) + mesh.local * (lax.axis_index("expert") if devices > 1 else 0)
                worked = rows * (1 + experts[:, None])
                return way.back(worked, plan).each(), rows, plan.sizes, experts

            found = jax.lax.map(one, jnp.arange(way.most_rounds))
            return *(value[None] for value in found), way.rounds(chosen[0])[None]

        specs = PartitionSpec("expert")
        run = jax.jit(jax.shard_map(rounds, in_specs=(specs, specs), out_specs=specs, check_vma=False))
        for load in LOADS:
            chosen = drawn(rng, load, devices)
            x = rng.normal(size=(devices, TOKENS, EMBED)).astype(np.float32)
            on_devices = (jax.device_put(v, jax.NamedSharding(placement.mesh, specs)) for v in (chosen, x))
            assert_each_copy_came_back_once(chosen, x, *jax.device_get(run(*on_devices)))


def assert_each_copy_came_back_once(chosen, x, back, rows, sizes, experts, needed):
    expected = np.repeat(x, K, axis=1) * np.where(chosen >= 0, 1 + chosen, 0)[..., None]
    np.testing.assert_allclose(back.sum(axis=1), expected, rtol=1e-6, err_msg="each copy once")
    assert sizes.sum() == (chosen >= 0).sum()
    assert len(set(needed)) == 1, "all devices run the same rounds"
    np.testing.assert_array_equal(sizes.sum(axis=(0, 2))[needed[0] :], 0)
    assert needed[0] == 0 or sizes.sum(axis=(0, 2))[needed[0] - 1] > 0
    np.testing.assert_array_equal(sizes.sum(axis=1).reshape(-1), np.bincount(chosen[chosen >= 0], minlength=EXPERTS))
    is_row = np.arange(rows.shape[2]) < sizes.sum(axis=-1, keepdims=True)
    assert rows[is_row].any(axis=-1).all()
    assert experts.shape == rows.shape[:-1]


@pytest.mark.parametrize("name", ["padded", "ragged"])
def test_dispatch_and_combine_are_transposes_of_each_other(name, ways, rng, placed):
    """⟨send(x), y⟩ = ⟨x, Σ of copies of back(y)⟩ for a round of any load."""
    placement = placed({"expert": 2})
    chosen = drawn(rng, "skewed", 2)
    with jax.set_mesh(placement.mesh):
        way = ways[name](ExpertMesh.of(axes.Scope(placement), EXPERTS), TOKENS * K, 1.25)
        x = rng.normal(size=(2, TOKENS, EMBED)).astype(np.float32)
        y = rng.normal(size=(2, way.num_rows, EMBED)).astype(np.float32)

        def both(chosen, x, y):
            plan = way.plan(chosen[0], jnp.zeros((), jnp.int32))
            is_row = jnp.arange(way.num_rows) < jnp.sum(plan.sizes)
            back = way.back(jnp.where(is_row[:, None], y[0], 0), plan).summed(K)
            return way.send(x[0], plan)[None], back[None], is_row[None]

        specs = PartitionSpec("expert")
        run = jax.shard_map(both, in_specs=specs, out_specs=specs, check_vma=False)
        arguments = (jax.device_put(v, jax.NamedSharding(placement.mesh, specs)) for v in (chosen, x, y))
        sent, returned, is_row = jax.device_get(jax.jit(run)(*arguments))
    sent = np.where(is_row[..., None], sent, 0)
    np.testing.assert_allclose(np.vdot(sent, y), np.vdot(x, returned), rtol=1e-4, atol=1e-4)


def test_rows_of_no_copy_reach_no_gradient(rng, placed):
    """They are what was in memory, NaN perhaps, and so are their weights and their cotangents."""
    experts, rows, mlp = 2, 12, 4
    shapes = (experts, EMBED, mlp), (experts, mlp), (experts, mlp, EMBED), (experts, EMBED)
    parameters = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    sizes = np.asarray([3, 4], np.int32)
    is_row = np.arange(rows) < sizes.sum()
    x, dy = (np.where(is_row[:, None], rng.normal(size=(1, rows, EMBED)), np.nan) for _ in range(2))
    weights = np.where(is_row, rng.random(rows), np.nan).astype(np.float32)
    mesh = ExpertMesh.of(axes.Scope(placed({"data": 1})), experts)

    @jax.jit
    def both(x, dy, weights, sizes, parameters):
        products = Products(mesh, sizes)

        def worked(up, up_bias, down, down_bias):
            return products.down(products.up(x, Matrix(up, bias=up_bias)), Matrix(down, bias=down_bias), weights)

        out, backward = jax.vjp(worked, *parameters)
        return out, backward(dy)

    out, gradients = jax.device_get(both(np.float32(x), np.float32(dy), weights, sizes, parameters))
    assert np.isfinite(out[:, is_row]).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert np.any(gradient)


def test_all_stages_of_a_pipeline_take_as_many_rounds_as_one_of_them_needs(placed, compiled):
    placement = placed({"pipe": 2, "expert": 2})
    balanced = np.arange(TOKENS * K).reshape(1, 2, -1, K) % EXPERTS
    chosen = np.concatenate([balanced, np.zeros_like(balanced)]).astype(np.int32)  # stage batch seq k

    def rounds(chosen):
        mesh = ExpertMesh.of(axes.Scope(placement), EXPERTS)
        return num_rounds(mesh, Padded(mesh, TOKENS * K // 2, capacity_factor=1.0), chosen[0])[None]

    def of_stages(chosen):
        split, by_stage = PartitionSpec("pipe"), axes.reshard(chosen, PartitionSpec("pipe", None, None, None))
        return jax.shard_map(rounds, in_specs=split, out_specs=split, axis_names={"pipe"}, check_vma=False)(by_stage)

    assert compiled(placement, of_stages, chosen).tolist() == [2, 2]
