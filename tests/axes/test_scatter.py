"""A reduce-scatter leaves each device its shard of the sum."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon.axes.placing import scatter_sum

SEED = np.random.SeedSequence().entropy


def partial_sums(mesh, x, spec):
    """An array on the mesh whose true value is the sum of `x` over its leading dimensions, one for each mesh axis."""
    names = tuple(mesh.axis_names)
    unreduced = PartitionSpec(*spec, unreduced=frozenset(names))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))
    take = jax.shard_map(
        lambda part: part.reshape(part.shape[len(names) :]),
        in_specs=PartitionSpec(*names),
        out_specs=unreduced,
        check_vma=False,
    )
    return take, placed


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("spec", [PartitionSpec("data", None), PartitionSpec(None, "data")])
def test_every_device_gets_its_shard_of_the_sum(spec, tiled):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(SEED).normal(size=(8, 16, 24)).astype(np.float32)
    take, placed = partial_sums(mesh, x, (None, None))
    with jax.set_mesh(mesh):
        made = jax.jit(lambda x: scatter_sum(take(x), spec, tiled))(placed)
    assert made.sharding.spec == spec
    np.testing.assert_allclose(np.asarray(made), x.sum(0), rtol=1e-5, atol=1e-5)


def test_sums_over_other_mesh_axes_stay_owed():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Explicit,) * 2)
    x = np.random.default_rng(SEED).normal(size=(2, 4, 8, 12)).astype(np.float32)
    take, placed = partial_sums(mesh, x, (None, None))

    def run(x):
        made = scatter_sum(take(x), PartitionSpec("data", None), tiled=False)
        assert jax.typeof(made).sharding.spec.unreduced == {"replica"}
        return jax.sharding.reshard(made, PartitionSpec("data", None))

    with jax.set_mesh(mesh):
        made = jax.jit(run)(placed)
    np.testing.assert_allclose(np.asarray(made), x.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_an_array_that_owes_no_sum_comes_back_as_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def run(x):
        assert scatter_sum(x, PartitionSpec("data", None), tiled=False) is x
        return x

    with jax.set_mesh(mesh):
        jax.jit(run)(jax.device_put(np.ones((8, 8)), NamedSharding(mesh, PartitionSpec())))
