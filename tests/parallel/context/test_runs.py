"""Runs of positions on devices: what each has from those before it, in whatever order they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon import axes
from axon.layout.zigzag import zigzag
from axon.parallel.context import Runs

SEQ, BATCH = 16, 2
LAYOUTS = {
    "two": ({"context": 2}, np.arange(SEQ), 2),
    "contiguous": ({"context": 8}, np.arange(SEQ), 8),
    "a ring": ({"context": 4}, zigzag(4, SEQ), 8),
    "a ring over fewer": ({"context": 2}, zigzag(4, SEQ), 4),
    "a ring beside an exchange": ({"context": 2, "ulysses": 2}, zigzag(2, SEQ), 4),
}
"""The mesh, the order in which positions are stored, and how many runs that makes."""


@pytest.fixture(params=LAYOUTS)
def on_devices(request, placed, compiled):
    """on_devices(fn, *arrays): `fn(runs, …)` of arrays `batch seq …`, in runs; the result in the order of positions."""
    mesh, stored, count = LAYOUTS[request.param]
    placement, split = placed(mesh, rows={"seq": tuple(mesh)}), tuple(mesh)
    spec = PartitionSpec(None, split)

    def whole(fn, *arrays):
        runs = Runs.of(split, stored)
        assert runs.count == count

        def local(*arrays):
            return runs.joined(fn(runs, *map(runs.split, arrays)))

        moved = (axes.reshard(jnp.asarray(x), spec) for x in arrays)
        return axes.per_device(local, [spec] * len(arrays), spec)(*moved)

    def run(fn, *arrays):
        in_order = compiled(placement, lambda *x: whole(fn, *x), *(x[:, stored] for x in arrays))
        return np.asarray(in_order)[:, np.argsort(stored)]

    return run


def test_a_run_has_what_those_some_places_before_it_have(on_devices):
    positions = np.broadcast_to(np.arange(1, SEQ + 1), (BATCH, SEQ))
    for by in (1, 3):
        found = on_devices(lambda runs, x, by=by: runs.before(x, by), positions)
        length = on_devices(lambda runs, x: jnp.full_like(x, x.shape[1]), positions)
        np.testing.assert_array_equal(found, np.maximum(positions - by * length, 0))


def test_the_state_before_a_run_is_that_of_a_loop_over_all_before_it(on_devices, rng):
    """Of each position a matrix and what it adds; a run's are their products."""
    factors, terms = rng.normal(0, 0.6, (2, BATCH, SEQ, 3, 3)).astype(np.float32)

    def states(runs, factors, terms):
        transition, added = jnp.eye(3), jnp.zeros(())
        for i in range(factors.shape[1]):
            transition, added = factors[:, i] @ transition, factors[:, i] @ added + terms[:, i] if i else terms[:, i]
        begun = runs.states(jnp.broadcast_to(transition, terms[:, 0].shape), added)
        found = []
        for i in range(factors.shape[1]):
            found.append(begun)
            begun = factors[:, i] @ begun + terms[:, i]
        return jnp.stack(found, axis=1)

    expected, state = [], np.zeros((BATCH, 3, 3))
    for i in range(SEQ):
        expected.append(state)
        state = factors[:, i] @ state + terms[:, i]
    found = on_devices(states, factors, terms)
    np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-4, atol=1e-4)
    assert jax.device_count() >= 8
