"""An all-gather in two stages gives what one gives; and the compilers of three-dimensional tori leave it a gather."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon import axes
from axon.axes.gather import gather_in_stages
from axon.axes.specs import partial_spec
from axon.layout import Layout, Placement
from axon.plan.topology import devices
from axon.runtime.options import compiler_options


@pytest.mark.parametrize("line", [2, 4])
@pytest.mark.parametrize("spec", [PartitionSpec("data", None), PartitionSpec(None, "data")])
def test_the_whole_array_arrives_in_order_and_its_cotangent_is_cut_again(line, spec, rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x, weights = (rng.normal(size=(16, 24)).astype(np.float32) for _ in range(2))

    def run(x, weights):
        whole, backward = jax.vjp(lambda x: gather_in_stages(x, PartitionSpec(None, None), line), x)
        return whole, *backward(whole * weights)

    with jax.set_mesh(mesh):
        whole, gradient = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)), weights)
    assert (whole.sharding.spec, gradient.sharding.spec) == (PartitionSpec(None, None), spec)
    np.testing.assert_array_equal(np.asarray(whole), x)
    np.testing.assert_array_equal(np.asarray(gradient), x * weights)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (PartitionSpec("data", None), 2),  # of a part of the mesh only
        (PartitionSpec("data", "tensor"), 2),
        (PartitionSpec(None, None), 2),
        (PartitionSpec("data", None), 1),
    ],
)
def test_what_is_no_gather_over_the_whole_mesh_comes_back_as_it_is(spec, line):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def run(x):
        assert gather_in_stages(x, PartitionSpec(None, None), line) is x
        return x

    with jax.set_mesh(mesh):
        jax.jit(run)(jax.device_put(np.ones((8, 8)), NamedSharding(mesh, spec)))


@pytest.mark.few(target=("v6e:4x4",))
@pytest.mark.parametrize(("target", "line"), [("v5p:4x4x4", 4), ("v5p:2x2x4", 1), ("v6e:4x4", 1), ("tpu7x:4x4x4", 2)])
def test_over_the_whole_torus_too_a_gather_stays_a_gather_and_a_reduce_scatter_one(target, line):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    placement = Placement.of(Layout({"data": -1}), devices(target))
    assert placement.torus_ring_size == line
    stored = NamedSharding(placement.mesh, PartitionSpec("data", None))
    array = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=stored)
    whole = PartitionSpec(None, None)

    def gather(weight):
        return axes.reshard(weight, whole)

    def reduce(x, y):
        gradient = jnp.einsum("be,bm->em", x, y, out_sharding=partial_spec(whole, {"data"}))
        return axes.reshard(gradient, stored.spec)

    uneven = jax.ShapeDtypeStruct((1024, 14464), jnp.bfloat16, sharding=stored)
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        lowered = [jax.jit(gather).lower(array), *(jax.jit(reduce).lower(array, y) for y in (array, uneven))]
    options = compiler_options(placement.devices)
    texts = [one.compile(compiler_options=options).as_text() for one in lowered]
    gathers, *reductions = (re.findall(r" (all-\w+|reduce-scatter)(?:-start)?\(", text) for text in texts)
    assert gathers == ["all-gather"] * (1 if line == 1 else 2)
    assert reductions == [["reduce-scatter"]] * 2
