"""How a model is held against the same mathematics in plain JAX."""

import jax
import numpy as np
import pytest

from axon.layout import Execution
from axon.nn import Inputs, cross_entropy


@pytest.fixture
def agrees(rng, placed, compiled, bind, packed_batch, random_parameters):
    """agrees(config, plain_loss, **fields): the loss and every gradient by an `Execution` with these fields are those
    of `plain_loss(config, values, batch)`."""

    def check(config, plain_loss, **fields):
        module = config.build()
        values, batch = random_parameters(module, rng), packed_batch(rng, 2, 18, config.vocab)

        def loss(values):
            model, weights = bind(module, values), batch["weights"] / batch["weights"].sum()
            x, *_ = model.hidden(Inputs(batch["tokens"], batch["positions"], batch["documents"]))
            return cross_entropy(x, model.output, batch["targets"], weights)[0]

        value, gradients = compiled(
            placed(), lambda v: jax.value_and_grad(loss)(v), values, execution=Execution(**fields)
        )
        plain, plain_gradients = jax.jit(jax.value_and_grad(lambda v: plain_loss(config, v, batch)))(values)
        np.testing.assert_allclose(value, plain, rtol=1e-5)
        whole = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(plain_gradients)))
        errors = jax.tree.map(lambda a, b: _relative(a, b, whole), gradients, plain_gradients)
        assert max(jax.tree.leaves(errors)) < 1e-5, errors

    return check


def _relative(one, other, whole):
    """The error of a gradient, of its own norm or of a hundredth of all gradients' norm, if that is larger."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-2 * whole)
