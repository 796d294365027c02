"""Layers move to the stages that run them, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec, reshard

from axon.parallel.pipeline import Interleaved, OneFOneB, ZeroBubbleV
from axon.parallel.pipeline.partition import NOTHING, partition
from axon.parallel.pipeline.storage import Storage

PIPE = PartitionSpec("pipe")


@pytest.mark.parametrize(
    ("schedule", "stages", "before", "layers"),
    [(Interleaved(3), 2, 0, 12), (ZeroBubbleV(), 4, 0, 13), (OneFOneB(), 4, 3, 9), (OneFOneB(), 4, 0, 3)],
    ids=str,
)
def test_layers_move_to_the_stages_that_run_them_and_back(schedule, stages, before, layers, rng):
    chunks = schedule.table(stages, 4).chunks
    times, costs = ([before] if before else []) + [layers], [1.0, 2.0][-1 - bool(before) :]
    *_, cut = partition(times, costs, chunks.total)
    storage = Storage(cut, chunks, "pipe")
    stored = rng.normal(size=(storage.stored * stages, 2)).astype(np.float32)
    stored[layers:] = 0
    numbers = storage.numbers.reshape(-1)
    expected = np.where(numbers[:, None] == NOTHING, 0, stored[numbers])
    mesh = jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:stages])

    def run(move):
        return jax.jit(jax.shard_map(move, in_specs=PIPE, out_specs=PIPE, check_vma=False))

    with jax.set_mesh(mesh):
        moved = run(storage.to_stages)(reshard(jnp.asarray(stored), PIPE))
        np.testing.assert_array_equal(moved, expected)
        np.testing.assert_array_equal(run(storage.from_stages)(moved), stored)
