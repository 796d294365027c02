"""Copies of tokens, sent to their experts and back: what each way does to any load, and what it may hold."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.parallel.expert import ExpertMesh, Padded, Ragged, ragged
from axon.parallel.expert.rounds import num_rounds

EXPERTS, TOKENS, K, EMBED = 8, 12, 2, 3
LOADS = ("random", "one", "own", "none", "skewed")


def emulated(operand, output, start, sent, to, received, *, axis_name):
    """`lax.ragged_all_to_all`, which CPUs lack: every device looks at what all others send."""
    everything = lax.all_gather((operand, start, sent, to), axis_name)
    operands, start, sent, to = jax.tree.map(lambda x: x, everything)
    me, place = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for device in range(operands.shape[0]):
        offset = place - to[device, me]
        is_here = (offset >= 0) & (offset < sent[device, me])
        found = operands[device][jnp.clip(start[device, me] + offset, 0, operands.shape[1] - 1)]
        output = jnp.where(is_here[:, None], found, output)
    return output


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", emulated)
    return {"padded": Padded, "ragged": Ragged}


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


@pytest.mark.few(devices=(2, 4), load=("one", "none"))
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("name", "devices"), [("padded", 1), *itertools.product(("padded", "ragged"), (2, 4, 8))])
def test_every_copy_reaches_its_expert_once_and_comes_back(name, devices, load, ways, rng, placed):
    """Over all rounds; rows are sorted by expert, those of no copy are 0 and beyond the sizes."""
    placement = placed({"expert": devices})
    chosen = drawn(rng, load, devices)
    x = rng.normal(size=(devices, TOKENS, EMBED)).astype(np.float32)
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
                return way.back(worked, plan), rows, plan.sizes, experts

            found = jax.lax.map(one, jnp.arange(way.most_rounds))
            return *(value[None] for value in found), way.rounds(chosen[0])[None]

        specs = PartitionSpec("expert")
        run = jax.shard_map(rounds, in_specs=(specs, specs), out_specs=specs, check_vma=False)
        chosen_on, x_on = (jax.device_put(v, jax.NamedSharding(placement.mesh, specs)) for v in (chosen, x))
        back, rows, sizes, experts, needed = jax.device_get(jax.jit(run)(chosen_on, x_on))
    expected = np.repeat(x, K, axis=1) * np.where(chosen >= 0, 1 + chosen, 0)[..., None]
    np.testing.assert_allclose(back.sum(axis=1), expected, rtol=1e-6, err_msg="each copy once")
    assert sizes.sum() == (chosen >= 0).sum()
    assert len(set(needed)) == 1, "all devices run the same rounds"
    np.testing.assert_array_equal(sizes.sum(axis=(0, 2))[needed[0] :], 0)
    assert needed[0] == 0 or sizes.sum(axis=(0, 2))[needed[0] - 1] > 0
    np.testing.assert_array_equal(sizes.sum(axis=1).reshape(-1), np.bincount(chosen[chosen >= 0], minlength=EXPERTS))
    is_row = np.arange(rows.shape[2]) < sizes.sum(axis=-1, keepdims=True)
    assert not rows[~is_row].any()
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
            back = way.back(jnp.where(is_row[:, None], y[0], 0), plan).reshape(TOKENS, K, EMBED)
            return way.send(x[0], plan)[None], jnp.sum(back, axis=1)[None]

        specs = PartitionSpec("expert")
        run = jax.shard_map(both, in_specs=specs, out_specs=specs, check_vma=False)
        arguments = (jax.device_put(v, jax.NamedSharding(placement.mesh, specs)) for v in (chosen, x, y))
        sent, returned = jax.device_get(jax.jit(run)(*arguments))
    np.testing.assert_allclose(np.vdot(sent, y), np.vdot(x, returned), rtol=1e-4, atol=1e-4)


def test_all_stages_of_a_pipeline_take_as_many_rounds_as_one_of_them_needs(placed, compiled):
    placement = placed({"pipe": 2, "expert": 2})
    balanced = np.arange(TOKENS * K).reshape(1, 2, -1, K) % EXPERTS
    chosen = np.concatenate([balanced, np.zeros_like(balanced)]).astype(np.int32)  # stage batch seq k

    def rounds(chosen):
        mesh = ExpertMesh.of(axes.Scope(placement), EXPERTS)
        return num_rounds(mesh, Padded(mesh, TOKENS * K // 2, margin=1.0), chosen[0])[None]

    def of_stages(chosen):
        split, by_stage = PartitionSpec("pipe"), axes.reshard(chosen, PartitionSpec("pipe", None, None, None))
        return jax.shard_map(rounds, in_specs=split, out_specs=split, axis_names={"pipe"}, check_vma=False)(by_stage)

    assert compiled(placement, of_stages, chosen).tolist() == [2, 2]
