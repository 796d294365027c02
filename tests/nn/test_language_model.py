"""The language model: generation's path gives the same distribution as training's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import Inputs
from models.gpt2 import GPT2
from models.llama import Llama

MODELS = [
    Llama(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, tied=True),
    Llama(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, window=5, unroll=False),
    GPT2(vocab=32, embed=16, layers=2, heads=4, mlp=24, positions=16),
]


@pytest.mark.parametrize("config", MODELS, ids=["tied", "window, scanned", "gpt2"])
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 2}])
def test_logits_token_by_token_are_those_of_the_whole_row_and_give_its_loss(
    config, mesh, rng, placed, compiled, bind, random_parameters
):
    module = config.build()
    values = random_parameters(module, rng)
    ids = rng.integers(0, 32, (2, 13), dtype=np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))

    def run(values):
        model = bind(module, values)
        whole = model.output.logits(model.hidden(Inputs(ids[:, :-1], positions))[0])
        objective, nll = model.loss(Inputs(ids[:, :-1], positions), ids[:, 1:], jnp.ones((2, 12)))

        def one(memory, start):
            at = jnp.broadcast_to(start, (2, 1))
            inputs = Inputs(jax.lax.dynamic_slice_in_dim(jnp.asarray(ids), start, 1, 1), at, start=start)
            x, memory = model.hidden(inputs, memory)
            return memory, model.output.logits(x)[:, 0]

        _, single = jax.lax.scan(one, model.memory(2, 15), jnp.arange(12, dtype=jnp.int32))
        return whole, jnp.swapaxes(single, 0, 1), nll, objective

    whole, single, nll, objective = (np.asarray(a) for a in compiled(placed(mesh), run, values))
    np.testing.assert_allclose(single, whole, rtol=1e-4, atol=1e-4)
    lse = np.log(np.exp(whole.astype(np.float64)).sum(-1))
    expected = np.sum(lse - np.take_along_axis(whole, ids[:, 1:, None], -1)[..., 0])
    np.testing.assert_allclose([nll, objective], expected, rtol=1e-5)


@pytest.mark.parametrize("config", MODELS[:2], ids=["tied", "untied"])
def test_matmul_parameters_are_the_matrices_and_the_head_once(config):
    blocks = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24)
    assert config.build().matmul_parameters == blocks + 32 * 16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 4}])
def test_padding_of_the_vocabulary_is_never_predicted_and_never_counted(
    tied, mesh, rng, placed, compiled, bind, random_parameters
):
    config = Llama(vocab=29, vocab_multiple=8, embed=16, layers=1, heads=4, kv_heads=4, mlp=24, tied=tied)
    module, plain = config.build(), replace(config, vocab_multiple=1).build()
    values = random_parameters(module, rng)
    ids = rng.integers(0, 29, (2, 9), dtype=np.int32)
    inputs = Inputs(ids[:, :-1], np.tile(np.arange(8, dtype=np.int32), (2, 1)))

    def objective(module, values):
        return bind(module, values).loss(inputs, ids[:, 1:], jnp.ones((2, 8)), 0.1)[0]

    def run(values):
        model = bind(module, values)
        return jax.value_and_grad(lambda v: objective(module, v))(values), model.output.logits(model.hidden(inputs)[0])

    (loss, gradients), logits = jax.device_get(compiled(placed(mesh), run, values))
    cut = dict(values, embedding={"table": values["embedding"]["table"][:29]})
    if not tied:
        cut["head"] = values["head"][:, :29]
    np.testing.assert_allclose(loss, compiled(placed(), lambda v: objective(plain, v), cut), rtol=1e-5)
    assert np.all(np.argmax(logits, -1) < 29)
    np.testing.assert_array_equal(jax.nn.softmax(logits)[..., 29:], 0)
    np.testing.assert_array_equal(gradients["embedding"]["table"][29:], 0)
    if not tied:
        np.testing.assert_array_equal(gradients["head"][:, 29:], 0)
