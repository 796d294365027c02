"""Reads in progress while a state is restored: as many as fit in what a process may hold, never all of an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.reader import largest_read

LIMITER = "orbax.checkpoint._src.serialization.limits.LimitInFlightBytes"


@pytest.fixture
def reads(monkeypatch):
    """The bytes of each read that is asked for, and the most that were in progress at a time."""
    from orbax.checkpoint._src.serialization.limits import LimitInFlightBytes

    wait, release = LimitInFlightBytes.wait_for_bytes, LimitInFlightBytes.release_bytes
    seen = {"asked": [], "now": 0, "most": 0}

    async def waited(self, count):
        seen["asked"].append(count)
        await wait(self, count)
        seen["now"] += count
        seen["most"] = max(seen["most"], seen["now"])

    async def released(self, count):
        seen["now"] -= count
        await release(self, count)

    monkeypatch.setattr(f"{LIMITER}.wait_for_bytes", waited)
    monkeypatch.setattr(f"{LIMITER}.release_bytes", released)
    return seen


def sharding(*spec):
    return NamedSharding(jax.make_mesh((4, 2), ("data", "tensor")), PartitionSpec(*spec))


@pytest.fixture
def saved(rng, tmp_path):
    """Arrays by name, each saved as 8 shards."""
    state = {name: rng.normal(size=(8 * 16, 64)).astype(np.float32) for name in "abc"}
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, {name: jax.device_put(x, sharding("data", "tensor")) for name, x in state.items()}, {})
    return state


def test_no_more_than_one_shard_is_read_at_a_time_where_shards_are_large(saved, reads, tmp_path, monkeypatch):
    monkeypatch.setattr("axon.checkpoint.reader.READ_AT_ONCE", 1)
    abstract = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding("data", "tensor")) for n, x in saved.items()
    }
    restored, _ = Reader(tmp_path).restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    shard = saved["a"].nbytes // 8
    assert reads["asked"] == [shard] * 24
    assert reads["most"] == shard


def test_small_shards_are_read_together(saved, reads, tmp_path):
    abstract = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding("data", "tensor")) for n, x in saved.items()
    }
    Reader(tmp_path).restore(abstract)
    assert reads["most"] > saved["a"].nbytes // 8


def test_what_a_read_takes_is_known_before_for_any_shards_padding_and_dtype(rng, reads, tmp_path, monkeypatch):
    monkeypatch.setattr("axon.checkpoint.reader.READ_AT_ONCE", 1)
    specs = [(), ("data",), (None, "tensor"), ("tensor", "data"), (("data", "tensor"),)]
    for step in range(1, 5):
        before, after = (sharding(*specs[i]) for i in rng.integers(len(specs), size=2))
        shape, other = (tuple(8 * rng.integers(1, 9, size=2)) for _ in range(2))
        with Store(tmp_path, Checkpoints()) as store:
            store.save(step, {"part": {"w": jax.device_put(rng.normal(size=shape).astype(np.float32), before)}}, {})
        reader = Reader(tmp_path)
        wanted = jax.ShapeDtypeStruct(other, jnp.bfloat16, sharding=after)
        reads["asked"].clear()
        reader.restore_arrays("part", {"w": wanted})
        expected = largest_read(reader.saved_leaves(step)["part/w"], wanted)
        assert max(reads["asked"]) == expected, (before, after, shape, other)
