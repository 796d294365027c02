"""Layers that lie on the stages of a pipeline run outside of it as they do on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon.axes import reshard, shard
from axon.layout import Execution, Layout
from axon.nn.param import with_zero_padding
from axon.nn.stored_layers import stored_layer
from axon.serve.offline import write
from axon.serve.request import Request, Sampling
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48)


def test_every_device_gets_the_layer_that_one_stage_has(placed, compiled, rng):
    weights = rng.normal(size=(6, 4, 8)).astype(np.float32)

    def run(x):
        x = reshard(x, PartitionSpec("pipe", None, "tensor"))
        return jnp.stack([reshard(stored_layer({"w": x}, i)["w"], PartitionSpec()) for i in range(6)])

    np.testing.assert_array_equal(compiled(placed({"pipe": 2, "tensor": 2}), run, weights), weights)


def evaluated(model, layout, devices, batch, unroll):
    options = {"execution": Execution(unroll=unroll), "devices": jax.devices()[:devices]}
    program = Program(model, layout, AdamW(Constant(1e-3)), batch=8, seq=16, **options)
    state = program.init()
    loss, tokens = program.evaluate(state, program.place(batch))["loss"]
    asked = Request((1, 2, 3), Sampling(tokens=4, temperature=0))
    (answer,) = write(program.runtime, state.parameters, state.variables, None, [asked])
    return float(loss) / float(tokens), answer.ids


def test_what_is_updated_of_identity_layers_is_zero(placed, compiled, rng):
    values = rng.normal(size=(4, 8)).astype(np.float32)

    def run(x):
        return with_zero_padding(1 / shard(x, "layers mlp"), 3)

    updated = compiled(placed({"pipe": 4, "tensor": 2}), run, values * (np.arange(4) < 3)[:, None])
    assert updated.sharding.spec == PartitionSpec("pipe", "tensor")
    found = np.asarray(updated)
    assert not np.any(found[3])
    np.testing.assert_allclose(found[:3], 1 / values[:3], rtol=1e-6)


@pytest.mark.full
@pytest.mark.some(layers=(3,), unroll=(False,))
@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("unroll", [True, False])
def test_evaluation_and_samples_do_not_depend_on_stages(unroll, layers, packed_batch, rng):
    batch, model = packed_batch(rng, 8, 16, 64), replace(MODEL, layers=layers)
    loss, text = evaluated(model, Layout(), 1, batch, unroll)
    stages = Layout({"pipe": 2, "tensor": 2}, microbatches=2, pad_layers=True)
    found, ours = evaluated(model, stages, 4, batch, unroll)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert ours == text
