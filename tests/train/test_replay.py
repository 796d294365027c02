"""A step that is done twice, on devices of which one may compute wrongly."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.layout import Layout, Placement
from axon.train.replay import Replay, SilentCorruption
from axon.train.state import State

AXES = {"scale": "embed", "up": "embed mlp"}
LAYOUT = Layout({"data": 2, "tensor": 2}, zero=3)


@pytest.fixture(scope="module")
def program():
    """What a replay needs of a program, around a step that adds its batch to all parameters."""
    placement = Placement.of(LAYOUT, jax.devices()[:4])
    return SimpleNamespace(placement=placement, runtime=SimpleNamespace(tracing=nullcontext, jit=jax.jit))


@pytest.fixture
def begin(program, rng):
    """begin(): the same state each time, sharded, of which one parameter has replicas."""
    values = {name: rng.normal(size=(4,) * len(axes.split())).astype(np.float32) for name, axes in AXES.items()}

    def state():
        placement = program.placement
        place = {name: placement.sharding(tuple(axes.split()), "optimizer") for name, axes in AXES.items()}
        step = jax.device_put(np.int32(4), placement.sharding((), "optimizer"))
        return State(step, {name: jax.device_put(values[name], place[name]) for name in AXES}, {})

    return state


@partial(jax.jit, donate_argnums=0)
def add(state, batch):
    return jax.tree.map(lambda x: x + batch, state), {"loss": batch.astype(jnp.float32)}


class Faulty:
    """A step whose second result has one flipped bit of a parameter on one device, which has a replica of it."""

    def __init__(self, device):
        self.device, self.calls = device, 0

    def __call__(self, state, batch):
        state, metrics = add(state, batch)
        self.calls += 1
        if self.calls == 2:
            state.parameters["scale"] = flipped(state.parameters["scale"], self.device)
        return state, metrics


def flipped(array, device):
    """`array` with its first lowest bit flipped on one device."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    for shard, value in zip(array.addressable_shards, shards, strict=True):
        if shard.device == device:
            value.view(np.uint32)[0] ^= 1
    placed = [jax.device_put(v, s.device) for v, s in zip(shards, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def test_a_step_done_twice_gives_what_it_gives_once_and_may_reuse_its_states_memory(program, begin):
    found, given = [], begin()
    state, metrics = Replay(program, add, lambda *said: found.append(said))(5, given, jnp.int32(3))
    assert given.parameters["up"].is_deleted()
    for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves(add(begin(), jnp.int32(3))), strict=True):
        np.testing.assert_array_equal(one, other)
    [(step, seconds, differing)] = found
    assert (step, differing) == (5, {})
    assert seconds > 0


def test_after_the_first_replay_nothing_is_compiled(program, begin):
    replay, compiled = Replay(program, add), []
    state, _ = replay(5, begin(), jnp.int32(3))
    listen = lambda event, *_, **__: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for step in (6, 7):
            state, _ = replay(step, state, jnp.int32(4))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert int(state.step) == 4 + 3 + 4 + 4
    assert not [event for event in compiled if "compile" in event]


def test_one_flipped_bit_in_one_replica_is_found_and_named_with_its_device(program, begin):
    device, found = program.placement.devices[2], []
    assert len({str(shard.index) for shard in begin().parameters["scale"].addressable_shards}) == 2
    replay = Replay(program, Faulty(device), lambda *said: found.append(said))
    with pytest.raises(SilentCorruption, match=rf"step 5.*\n.*parameters/scale: on devices {device.id}\n"):
        replay(5, begin(), jnp.int32(3))
    assert found[0][2] == {"parameters/scale": [device.id]}


def test_a_nan_is_not_a_difference_and_the_sign_of_zero_is(program):
    replay = Replay(program, add)
    one = ({"x": jnp.array([np.nan, 0.0]), "y": jnp.array([1, 2])}, {})
    assert not replay._differing(one, jax.tree.map(jnp.copy, one))
    other = ({"x": jnp.array([np.nan, -0.0]), "y": jnp.array([1, 2])}, {})
    assert list(replay._differing(one, other)) == ["x"]
