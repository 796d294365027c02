"""A layout on devices: the mesh, specs, the fall-back of roles, and what does not fit."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from axon.layout import Layout, LayoutError, Placement, first_devices
from axon.parallel.pipeline import Interleaved


def test_the_mesh_has_the_layouts_order_whatever_the_order_of_writing():
    placement = Placement.of(Layout(mesh={"tensor": 2, "data": -1, "replica": 2}))
    assert dict(placement.mesh.shape) == {"replica": 2, "data": 2, "tensor": 2}
    assert list(placement.mesh.shape) == ["replica", "data", "tensor"]
    assert placement.platform == "cpu"
    assert [d.id for d in placement.mesh.devices[0, 0]] == [0, 1], "neighbours along the last axis, the fastest link"


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"data": 2, "context": 4}, {"data": 2, "context": 2, "ulysses": 2}),
        ({"context": 8}, {"context": 4, "ulysses": 2}),
        ({"context": 2, "ulysses": 4}, {"context": 2, "ulysses": 4}),
    ],
)
def test_usp_makes_two_mesh_axes_of_context_where_the_mesh_has_not_both(mesh, expected):
    assert dict(Placement.of(Layout(mesh, context="usp")).mesh.shape) == expected


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 3, "tensor": 2}, {}])
def test_a_mesh_of_fewer_devices_than_there_are_takes_the_first(mesh):
    placement = Placement.of(Layout(mesh=mesh))
    assert placement.devices == jax.devices()[: placement.mesh.size]
    assert placement.mesh.size == int(np.prod([*mesh.values()]))


def test_of_several_processes_each_has_as_many_devices_of_a_smaller_mesh(monkeypatch):
    devices = [SimpleNamespace(process_index=number // 4, id=number) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    taken = {size: [d.id for d in first_devices(Layout(mesh={"data": size}))] for size in (2, 4, 3, -1, 16)}
    assert taken == {2: [0, 4], 4: [0, 1, 4, 5]} | {size: [*range(8)] for size in (3, -1, 16)}


def test_axes_are_explicit_and_by_a_flag_auto():
    assert set(Placement.of(Layout()).mesh.axis_types) == {AxisType.Explicit}
    assert set(Placement.of(Layout(auto=True)).mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 64}, r"data 64 = 64 devices, and there are 8\..* write -1 .*device_count=64"),
        ({"data": -1, "tensor": 3}, "tensor 3, and 8 devices are not divisible by 3"),
        ({"data": -1, "tensor": 16}, "tensor 16, and 8 devices are not divisible by 16"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_says_both_counts(mesh, message):
    with pytest.raises(LayoutError, match=message):
        Placement.of(Layout(mesh=mesh))


def test_a_role_has_a_row_of_its_own_and_else_its_axis_row(placed):
    placement = placed({"context": 2, "tensor": 2}, rows={"seq.residual": ("context", "tensor")})
    assert placement.mesh_axes("seq.residual") == ("context", "tensor")
    assert placement.mesh_axes("seq.other") == ("context",)
    assert placement.spec(("batch", "seq.residual", "embed")) == PartitionSpec(None, ("context", "tensor"), None)
    assert placement.spec(("batch", "seq", "mlp")) == PartitionSpec(None, "context", "tensor")


def test_mesh_axes_of_size_one_are_left_out_of_specs(placed):
    placement = placed({"data": 1, "tensor": 2})
    assert placement.spec(("batch", "mlp")) == PartitionSpec(None, "tensor")
    assert placement.mesh_axes("batch") == ()
    assert placement.num_shards("mlp") == 2
    assert placement.num_shards("embed") == 1


def test_one_mesh_axis_cannot_split_two_axes_of_an_array_even_on_one_device(placed):
    for mesh in (None, {"tensor": 2}):
        placement = placed(mesh, rows={"head_dim": "tensor"})
        with pytest.raises(LayoutError, match="split twice over mesh axis 'tensor': by 'heads' and by 'head_dim'"):
            placement.spec(("embed", "heads", "head_dim"))


def test_an_unknown_axis_names_the_nearest_and_the_row_to_write(placed):
    with pytest.raises(LayoutError, match=r"'vocabulary' is not .* Did you mean 'vocab'\? .*\{'vocabulary': None\}"):
        placed().spec(("vocabulary",))


def test_manual_mesh_axes_are_left_out_of_specs(placed):
    placement = placed({"data": 2, "tensor": 2})
    found = []

    def local(x):
        found.append(placement.spec(("batch", "mlp")))
        return x

    spec = PartitionSpec("data")
    x = jax.device_put(np.ones((2, 2), np.float32), placement.sharding(("batch", "embed")))
    with jax.set_mesh(placement.mesh):
        jax.jit(jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={"data"}))(x)
    assert found[-1] == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, 10),
        ({"pad_layers": True}, 10),
        ({"mesh": {"pipe": 4}}, 10),
        ({"mesh": {"pipe": 4}, "pad_layers": True}, 12),
        ({"mesh": {"pipe": 2, "tensor": 4}, "pad_layers": True}, 10),
        ({"mesh": {"pipe": 4}, "pad_layers": True, "schedule": Interleaved(2)}, 12),
    ],
)
def test_layers_are_padded_to_as_many_on_every_stage(options, stored, placed):
    assert placed(**options).stored_layers(10) == stored


def test_a_sharding_puts_each_part_on_its_device(placed):
    placement = placed({"data": 2, "tensor": 4})
    x = jax.device_put(np.arange(64.0).reshape(8, 8), placement.sharding(("batch", "mlp")))
    assert {s.data.shape for s in x.addressable_shards} == {(4, 2)}


def test_a_described_placement_needs_no_devices():
    placement = Placement.described(Layout(mesh={"data": -1, "tensor": 8}, zero=3), 1024)
    assert dict(placement.mesh.shape) == {"data": 128, "tensor": 8}
    assert placement.spec(("embed", "mlp"), "params") == PartitionSpec("data", "tensor")
    assert dict(Placement.described(Layout(mesh={"data": 64}), 1).mesh.shape) == {"data": 64}
