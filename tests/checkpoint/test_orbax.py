"""What Orbax is given and gives back."""

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

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
