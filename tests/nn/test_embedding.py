"""Embedding: a look-up and its gradient, wherever the table's rows lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.axes import shard
from axon.nn import Embedding

DIMS = {"vocab": 24, "embed": 8}
LAYOUTS = [
    ({"data": 4}, {"zero": 3}),
    ({"data": 2, "tensor": 4}, {"zero": 3}),
    ({"tensor": 8}, {}),
    ({"context": 2, "tensor": 4}, {}),
    ({"data": 2, "x": 2}, {"rows": {"vocab": None, "embed": "x"}, "order": ("data", "x")}),
    ({"data": 4}, {"rows": {"vocab": "data"}}),
    BOTH := ({"data": 2, "context": 4}, {"params": {"embed": ("data", "context")}}),
]


@pytest.fixture
def run(bind):
    """run(table, ids, weight): vectors of `ids`, and the table's gradient of their inner product with `weight`."""

    def both(table, ids, weight):
        embedding = Embedding("vocab", DIMS, 1.0)
        look_up = lambda t: bind(embedding, {"table": t})(shard(ids, "batch seq"))  # noqa: E731
        return look_up(table), jax.grad(lambda t: jnp.sum(look_up(t).astype(jnp.float32) * weight))(table)

    return both


@pytest.mark.few(auto=(False,))
@pytest.mark.parametrize("seq", [8, 32], ids=["vectors move", "table moves"])
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_a_look_up_and_its_gradient_do_not_depend_on_the_layout(mesh, options, auto, seq, rng, placed, compiled, run):
    ids = rng.integers(0, 24, (4, seq), dtype=np.int32)
    table, weight = rng.normal(size=(24, 8)).astype(np.float32), rng.normal(size=(4, seq, 8)).astype(np.float32)
    placement = placed(mesh, auto=auto, **options)
    stored = jax.device_put(table, placement.sharding(("vocab", "embed"), "params"))
    found, gradient = compiled(placement, lambda t: run(t, ids, weight), stored)
    np.testing.assert_array_equal(found, table[ids])
    expected = np.zeros((24, 8))
    np.add.at(expected, ids, weight)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_no_device_has_all_vectors_where_they_change_hands_over_both_dimensions(rng, placed, run):
    mesh, options = BOTH
    placement, table = placed(mesh, **options), rng.normal(size=(24, 8)).astype(np.float32)
    stored = jax.device_put(table, placement.sharding(("vocab", "embed"), "params"))
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        arguments = stored, np.zeros((4, 32), np.int32), np.zeros((4, 32, 8), np.float32)
        text = jax.jit(lambda *arguments: run(*arguments)).lower(*arguments).compile().as_text()
    assert "f32[4,32,1]" in text
    assert "f32[4,32,8]" not in text.split("ENTRY")[1].replace("parameter", "")


def test_without_a_layout_it_is_indexing(rng):
    embedding, ids = Embedding("vocab", DIMS, 1.0), rng.integers(0, 24, (2, 3))
    embedding.table.set_value(jnp.asarray(rng.normal(size=(24, 8)), jnp.float32))
    np.testing.assert_array_equal(embedding(jnp.asarray(ids)), embedding.table.get_value()[ids])


def test_a_bf16_look_up_gathers_bf16_and_sums_its_gradient_in_float32(rng, placed, compiled, run):
    ids = np.full((16, 64), 3, np.int32)
    table, weight = rng.normal(size=(24, 8)).astype(np.float32), np.full((16, 64, 8), 1.0, np.float32)
    call = lambda t: run(t, ids, weight)  # noqa: E731
    found, gradient = compiled(placed({"data": 2, "tensor": 2}), call, table, compute=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient[3], 1024)
