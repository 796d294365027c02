"""Gated DeltaNet on a layout: where positions are split, each shard takes up the state of those before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.layout import sequence_parallel
from axon.nn import Inputs
from axon.nn.gated_delta import GatedDeltaNet

DIMS = {"embed": 16, "delta_heads": 2, "per_head": 2, "key_dim": 6, "value_dim": 4, "conv_taps": 4}
SEQ = 32
LAYOUTS = {
    "contiguous": ({"context": 4}, {"context": "gather"}),
    "a ring": ({"context": 4}, {"context": "ring"}),
    "runs shorter than a convolution": ({"context": 8}, {"context": "ring"}),
    "a ring and an exchange": ({"context": 2, "ulysses": 2}, {"context": "usp"}),
    "positions and heads": ({"context": 2, "tensor": 2, "data": 2}, {"context": "ring", "rows": sequence_parallel()}),
}


@pytest.fixture
def problem(rng, bind, random_parameters, packed_batch):
    """problem(order): a loss of outputs, for values and an input that are stored so; the values, and the input."""
    module = GatedDeltaNet(DIMS, 1e-2)
    values, batch = random_parameters(module, rng), packed_batch(rng, 2, SEQ, 8)
    x, ct = rng.normal(size=(2, 2, SEQ, DIMS["embed"])).astype(np.float32)

    def loss(order):
        inputs = Inputs(*(batch[name][:, order] for name in ("tokens", "positions", "documents")))

        def of(values, x):
            out, _ = bind(module, values)(axes.shard(x[:, order], "batch seq embed"), inputs)
            return jnp.sum(axes.shard(out, "batch seq embed") * ct[:, order])

        return jax.value_and_grad(of, (0, 1))

    return loss, values, x


@pytest.mark.few(layout=("a ring",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_do_not_depend_on_the_layout(layout, problem, placed, compiled):
    loss, values, x = problem
    mesh, fields = LAYOUTS[layout]
    placement = placed(mesh, **fields)
    found = compiled(placement, loss(placement.stored_positions(SEQ)), values, x)
    expected = jax.jit(loss(np.arange(SEQ)))(values, x)
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(expected)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * max(np.linalg.norm(other), 1e-2 * whole)
