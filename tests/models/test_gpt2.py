"""GPT-2 against the same mathematics written out in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.nn import Inputs, parameters
from models.gpt2 import GPT2

SMALL = {"vocab": 40, "embed": 24, "layers": 2, "heads": 4, "mlp": 32, "positions": 20}


def layer_norm(x, p, eps):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + eps) * p["scale"] + p["bias"]


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain_loss(config, values, batch):
    """Mean negative log-likelihood over real tokens."""
    table, width = values["embedding"]["table"], config.embed // config.heads
    index = np.arange(batch["tokens"].shape[1])
    seen = (index[:, None] >= index) & (batch["documents"][:, :, None] == batch["documents"][:, None, :])
    x = table[batch["tokens"]] + values["positions"]["table"][batch["positions"]]
    for layer in range(config.layers):
        p = jax.tree.map(lambda v, layer=layer: v[layer], values["layers"]["block"])
        h, a = layer_norm(x, p["attention_norm"], config.norm_eps), p["attention"]
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, a[n]) + a[f"{n}_bias"] for n in ("query", "key", "value"))
        scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        x = x + jnp.einsum("bshd,hde->bse", mixed, a["out"]) + a["out_bias"]
        h, m = layer_norm(x, p["mlp_norm"], config.norm_eps), p["mlp"]
        x = x + gelu(h @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"]
    logits = layer_norm(x, values["norm"], config.norm_eps) @ table.T
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(nll * batch["weights"]) / batch["weights"].sum()


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"unroll": False, "remat": "full"}], ids=["unrolled", "scanned"])
def test_loss_and_gradients_are_those_of_the_plain_model(options, agrees):
    agrees(GPT2(**SMALL), plain_loss, **options)


def test_the_small_model_has_the_published_number_of_parameters():
    assert sum(int(np.prod(spec.shape)) for spec in parameters(GPT2().build()).values()) == 124_439_808


@pytest.mark.full
@pytest.mark.draws(1)
def test_dropout_falls_in_training_only_and_in_three_places(rng, seed, placed, compiled, bind, random_parameters):
    module = GPT2(**SMALL, dropout=0.5).build()
    values, ids = random_parameters(module, rng), rng.integers(0, 20, (2, 8), dtype=np.int32)

    def hidden(values, key):
        inputs = Inputs(ids, ids, key=key, sequences=jnp.arange(2, dtype=jnp.int32))
        return bind(module, values).hidden(inputs)[0]

    def run(values, seeds):
        return hidden(values, None), jax.lax.map(lambda seed: hidden(values, jax.random.key(seed)), seeds)

    plain, (one, other) = compiled(placed(), run, values, np.uint32([seed, seed + 1]))
    assert not np.allclose(plain, one)
    assert not np.allclose(one, other)


def test_sequences_longer_than_the_positions_it_knows_are_refused(bind, random_parameters, rng):
    module = GPT2(**SMALL).build()
    model = bind(module, random_parameters(module, rng))
    ids = jnp.zeros((1, 21), jnp.int32)
    message = r"sequences of 21 positions, and embeddings for 20; raise GPT2.positions"
    with pytest.raises(UserError, match=message):
        model.hidden(Inputs(ids, ids))
