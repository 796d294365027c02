"""The language model: generation's path gives the same distribution as training's."""

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
        whole = model.logits(model.hidden(Inputs(ids[:, :-1], positions))[0])
        objective, nll = model.loss(Inputs(ids[:, :-1], positions), ids[:, 1:], jnp.ones((2, 12)))

        def one(memory, start):
            at = jnp.broadcast_to(start, (2, 1))
            inputs = Inputs(jax.lax.dynamic_slice_in_dim(jnp.asarray(ids), start, 1, 1), at, start=start)
            x, memory = model.hidden(inputs, memory)
            return memory, model.logits(x)[:, 0]

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
