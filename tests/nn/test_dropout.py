"""Dropout: the right share, by row, layer and place, whatever the mesh and the microbatches."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.axes import shard
from axon.errors import UserError
from axon.nn import Dropout, Inputs
from axon.plan.compiled import collectives


def given(seed, rows=8, seq=16, first=0, key=True):
    ids = jnp.zeros((rows, seq), jnp.int32)
    index = jnp.arange(first, first + rows, dtype=jnp.int32)
    return Inputs(ids, ids, key=jax.random.key(seed) if key else None, sequences=index)


def test_the_rest_is_scaled_so_that_the_mean_stays(seed):
    rate = 0.3
    out = np.asarray(jax.jit(lambda x: Dropout(rate, "here")(x, given(seed)))(jnp.ones((8, 16, 64))))
    kept = out != 0
    np.testing.assert_allclose(out[kept], 1 / (1 - rate), rtol=1e-6)
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / out.size)


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero(seed):
    x = jnp.ones((8, 16, 4))
    assert Dropout(0.5, "here")(x, given(seed, key=False)) is x
    assert Dropout(0.0, "here")(x, given(seed)) is x


def test_places_rows_layers_and_keys_drop_different_elements(seed):
    x = jnp.ones((2, 16, 64))
    inputs = given(seed, rows=2)
    other = given(seed + 1, rows=2)

    def drops(*inputs):
        cases = ("a", inputs[0]), ("b", inputs[0]), *(("a", one) for one in inputs[1:])
        return [Dropout(0.5, name)(x, one) for name, one in cases]

    rows = np.concatenate(jax.jit(drops)(inputs, inputs.in_layer(0), inputs.in_layer(1), other)).reshape(-1, 16 * 64)
    shares = np.mean(rows[:, None] == rows[None], axis=-1) - np.eye(len(rows))
    assert np.max(np.abs(shares[~np.eye(len(rows), dtype=bool)] - 0.5)) < 0.1


def test_a_row_drops_the_same_elements_in_any_part_of_the_batch(seed):
    x = jnp.ones((8, 16, 4))
    drop = jax.jit(Dropout(0.5, "here").__call__)
    whole, part = jax.device_get((drop(x, given(seed)), drop(np.ones((3, 16, 4)), given(seed, rows=3, first=4))))
    np.testing.assert_array_equal(part, whole[4:7])


LAYOUTS = [
    ({"data": 1}, {}),
    ({"data": 4}, {}),
    ({"data": 2, "context": 4}, {}),
    ({"data": 2, "tensor": 2}, {}),
    ({"data": 2, "tensor": 4}, {"rows": {"seq.residual": ("context", "tensor")}}),
    ({"data": 2, "context": 2, "x": 2}, {"rows": {"embed": "x"}, "order": ("data", "context", "x")}),
]


def drop(x, sequences, seed):
    """Half of the elements of `batch seq embed`."""
    ids, key = jnp.zeros(x.shape[:2], jnp.int32), jax.random.key(seed)
    inputs = Inputs(ids, ids, key=key, sequences=shard(sequences, "batch"))
    return Dropout(0.5, "here")(shard(x, "batch seq.residual embed"), inputs)


without_a_layout = jax.jit(drop)


@pytest.fixture
def operands(seed):
    return np.ones((8, 16, 4), np.float32), np.arange(8, dtype=np.int32), np.uint32(seed)


@pytest.mark.few(auto=(False,), mesh=[LAYOUTS[i][0] for i in (0, 4, 5)])
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_dropout_does_not_depend_on_the_layout(mesh, options, auto, operands, placed, compiled):
    made = compiled(placed(mesh, auto=auto, **options), drop, *operands)
    np.testing.assert_array_equal(made, without_a_layout(*operands))


def test_dropout_does_not_depend_on_the_order_in_which_positions_are_stored(operands, placed, compiled):
    placement = placed({"data": 2, "context": 4}, context="ring")
    made = compiled(placement, drop, *operands)
    stored = placement.stored_positions(16)
    np.testing.assert_array_equal(made, np.asarray(without_a_layout(*operands))[:, stored])


@pytest.mark.few(auto=(False,), mesh=[LAYOUTS[i][0] for i in (4, 5)])
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_each_device_draws_for_its_own_elements_alone(mesh, options, auto, seed, placed):
    placement, shape = placed(mesh, auto=auto, **options), (16, 32, 64)
    names = ("batch", "seq.residual", "embed")
    operands = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placement.sharding(names)),
        jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=placement.sharding(names[:1])),
    )
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        text = jax.jit(lambda *operands: drop(*operands, seed)).lower(*operands).compile().as_text()
    sizes = [math.prod(int(n) for n in found.split(",")) for found in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    assert max(sizes) == math.prod(placement.sharding(names).shard_shape(shape))
    assert not collectives(text)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(UserError, match=r"Dropout\.rate is"):
        Dropout(rate, "here")
