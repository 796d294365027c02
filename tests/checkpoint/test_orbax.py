"""What Orbax is given and gives back."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from axon.checkpoint import Checkpoints, Store, orbax
from axon.checkpoint.aligned import aligned_zeros
from axon.checkpoint.orbax import ArrayTree, training
from axon.runtime.scratch import Scratch
from axon.runtime.stored import Files, StoredArray


def test_a_tree_of_arrays_in_files_and_in_memory_comes_back_in_memory(rng, tmp_path):
    values = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("in files", "in memory")}
    (tmp_path / "scratch").mkdir()
    sharding = SingleDeviceSharding(jax.devices()[0])
    files = Files(Scratch("optimizer", str(tmp_path / "scratch"), 0))
    stored = StoredArray(files, "x", (3, 4), np.dtype(np.float32), sharding, stacked=True).fill(values["in files"])
    with training.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save_checkpointables(
            1, {"state": ArrayTree({"in files": stored, "in memory": jax.numpy.asarray(values["in memory"])})}
        )
        found = checkpointer.load_checkpointables(1, {"state": ArrayTree(None)})["state"].tree
    jax.tree.map(np.testing.assert_array_equal, found, values)


def test_what_is_read_is_the_devices_without_a_copy_and_is_not_written_over(rng, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(orbax, "aligned_zeros", lambda *of: read.append(aligned_zeros(*of)) or read[-1])
    value = rng.normal(size=(8, 64)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, {"w": jax.device_put(value, sharding)}, {})
        store.wait()
        (found, _) = store.restore({"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)})
    pointers = {shard.data.unsafe_buffer_pointer() for shard in found["w"].addressable_shards}
    assert pointers == {array.ctypes.data for array in read}
    before = [array.copy() for array in read]
    changed = jax.jit(lambda x: -x, donate_argnums=0)(found["w"])
    for shard in changed.addressable_shards:
        np.testing.assert_array_equal(shard.data, -value[shard.index])
    jax.tree.map(np.testing.assert_array_equal, read, before)  # four devices share each
