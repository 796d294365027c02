"""Functions of whole sequences, in the order of their positions, wherever the layout stores these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import over_positions, shard

LAYOUTS = [
    ({"data": 2, "context": 4}, "gather"),
    ({"data": 2, "context": 4}, "ring"),
    ({"context": 2, "ulysses": 2}, "usp"),
]


def shifted_sum(x):
    """Of each position, the sum up to it, and its neighbour: what depends on the order."""
    return jnp.cumsum(x, axis=1) + jnp.roll(x, -1, axis=1)


def test_without_a_layout_it_is_the_function(rng):
    x = rng.normal(size=(2, 16)).astype(np.float32)
    np.testing.assert_array_equal(over_positions(shifted_sum, x), shifted_sum(x))


@pytest.mark.few(layout=LAYOUTS[1:2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [(), (3,)], ids=["plain", "wide"])
def test_it_is_of_positions_in_their_order_and_its_result_in_the_order_in_which_they_are_stored(
    layout, width, rng, placed, compiled
):
    mesh, context = layout
    placement = placed(mesh, context=context)
    x = rng.normal(size=(4, 16, *width)).astype(np.float32)
    stored = placement.stored_positions(16)

    def run(x):
        return over_positions(shifted_sum, shard(x[:, stored], "batch seq" + " embed" * len(width)))

    ours = compiled(placement, run, x)
    np.testing.assert_allclose(ours, shifted_sum(x)[:, stored], rtol=1e-6, atol=1e-6)
    assert ours.sharding.spec[1:] == (None,) * (1 + len(width))


def test_gradients_come_back_in_the_order_of_storage(rng, placed, compiled):
    placement = placed({"context": 2}, context="ring")
    x, weight = (rng.normal(size=(2, 8)).astype(np.float32) for _ in range(2))
    stored = placement.stored_positions(8)
    loss = lambda x: jnp.sum(over_positions(shifted_sum, shard(x, "batch seq")) * weight)  # noqa: E731
    ours = compiled(placement, jax.grad(loss), x[:, stored])
    theirs = jax.grad(lambda x: jnp.sum(shifted_sum(x)[:, stored] * weight))(x)
    np.testing.assert_allclose(ours, theirs[:, stored], rtol=1e-6, atol=1e-6)
