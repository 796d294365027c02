"""An all-gather in two stages gives what one gives; and the compilers of three-dimensional tori leave it a gather."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon import axes
from axon.axes.placing import gather_in_stages
from axon.axes.specs import partial_spec
from axon.chips import xla_options
from axon.layout import Layout, Placement
from axon.plan.topology import devices


@pytest.mark.parametrize("line", [2, 4])
@pytest.mark.parametrize(
    ("sizes", "spec", "whole"),
    [
        ((8,), PartitionSpec("data", None), PartitionSpec(None, None)),
        ((8,), PartitionSpec(None, "data"), PartitionSpec(None, None)),
        ((8, 1), PartitionSpec(("data", "tensor"), None), PartitionSpec(None, None)),
        ((4, 2), PartitionSpec("data", "tensor"), PartitionSpec(None, "tensor")),
        ((2, 4), PartitionSpec(("tensor", "data"), None), PartitionSpec(None, None)),
    ],
    ids=str,
)
def test_the_whole_array_arrives_in_order_and_its_cotangent_is_cut_again(line, sizes, spec, whole, rng):
    names = ("data", "tensor")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(sizes))
    x, weights = (rng.normal(size=(16, 24)).astype(np.float32) for _ in range(2))

    def run(x, weights):
        gathered, backward = jax.vjp(lambda x: gather_in_stages(x, whole, lambda _: line), x)
        return gathered, *backward(gathered * weights)

    with jax.set_mesh(mesh):
        gathered, gradient = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)), weights)
    assert (gathered.sharding.spec, gradient.sharding.spec) == (whole, spec)
    np.testing.assert_array_equal(np.asarray(gathered), x)
    np.testing.assert_array_equal(np.asarray(gradient), x * weights)


@pytest.mark.parametrize(
    ("spec", "line"),
    [(PartitionSpec("data", "tensor"), 2), (PartitionSpec(None, None), 2), (PartitionSpec("data", None), 1)],
)
def test_what_is_no_gather_of_one_dimension_or_stays_in_a_plane_comes_back_as_it_is(spec, line):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def run(x):
        assert gather_in_stages(x, PartitionSpec(None, None), lambda _: line) is x
        return x

    with jax.set_mesh(mesh):
        jax.jit(run)(jax.device_put(np.ones((8, 8)), NamedSharding(mesh, spec)))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("target", "mesh", "line"),
    [
        ("v5p:4x4x4", {"data": 64}, 4),
        ("v5p:4x4x4", {"data": 32, "tensor": 2}, 4),
        ("v5p:4x4x4", {"data": 16, "tensor": 4}, 1),
        ("v5p:2x2x4", {"data": 16}, 1),
        ("v6e:4x4", {"data": 16}, 1),
        ("tpu7x:4x4x4", {"data": 128}, 2),
    ],
    ids=str,
)
def test_over_a_torus_too_a_gather_stays_one_beside_other_work_and_a_reduce_scatter_one(target, mesh, line):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    placement = Placement.of(Layout(mesh), devices(target))
    assert placement.torus_ring_size(("data",)) == line
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
    options = {option.name: option.value for option in xla_options(placement.devices)[0]}
    texts = [one.compile(compiler_options=options).as_text() for one in lowered]
    gathers, *reductions = (re.findall(r" (all-\w+|reduce-scatter)(?:-start)?\(", text) for text in texts)
    assert gathers == ["all-gather"] * (1 if line == 1 else 2)
    assert reductions == [["reduce-scatter"]] * 2
    if target.startswith("v5p") and line > 1:
        assert texts[0].count(" call-start(") == 2  # on the SparseCores, which leave the TensorCore to other work
