import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon.axes import permute


@pytest.mark.parametrize("mesh_axes", list(itertools.permutations("abc")), ids="".join)
def test_devices_are_numbered_in_the_order_in_which_the_mesh_axes_are_given(mesh_axes, rng):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    destinations = rng.permutation(8)
    pairs = [(source, int(destinations[source])) for source in range(6)]

    def numbers():
        return permute(lax.axis_index(mesh_axes)[None] + 1, mesh_axes, pairs)

    with jax.set_mesh(mesh):
        arrived = jax.jit(jax.shard_map(numbers, in_specs=(), out_specs=PartitionSpec(mesh_axes)))()
    assert arrived.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(mesh_axes)), 1)
    expected = np.zeros(8, int)
    for source, destination in pairs:
        expected[destination] = source + 1
    assert np.array_equal(arrived, expected)
