"""Layers that lie on the stages of a pipeline run outside of it as they do on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon.axes import reshard
from axon.layout import Layout
from axon.nn.stored_layers import stored_layer
from axon.serve.generate import Generator, Sampling
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


def evaluated(layout, devices, batch, unroll):
    program = Program(
        replace(MODEL, unroll=unroll), layout, AdamW(Constant(1e-3)), batch=8, seq=16, devices=jax.devices()[:devices]
    )
    state = program.init()
    loss, tokens = program.evaluate(state, program.place(batch))["loss"]
    text = Generator(program.runtime)(state.parameters, [1, 2, 3], Sampling(tokens=4, temperature=0))
    return float(loss) / float(tokens), text


@pytest.mark.few(unroll=(False,))
@pytest.mark.parametrize("unroll", [True, False])
def test_evaluation_and_samples_do_not_depend_on_stages(unroll, packed_batch, rng):
    batch = packed_batch(rng, 8, 16, 64)
    loss, text = evaluated(Layout(), 1, batch, unroll)
    found, ours = evaluated(Layout({"pipe": 2, "tensor": 2}, microbatches=2), 4, batch, unroll)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert ours == text
