"""Collectives of a program's text: bytes, mesh axes, how often, and whether they are asynchronous."""

import pytest

from axon.plan.collectives import collectives
from axon.plan.compiled import cycles
from axon.plan.hlo import Module
from axon.plan.report import summed

MESH = {"data": 4, "tensor": 2}


def program(*lines, computations=""):
    body = "\n".join(f"  %x.{i} = {line}" for i, line in enumerate(lines))
    entry = f"ENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
    return f"HloModule m\n{computations}\n{entry}"


def the_one(*lines, computations=""):
    (one,) = collectives(program(*lines, computations=computations))
    return one


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",), 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),  # one stage of a sum in two
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "tensor"), 8),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",), 4),
        ("replica_groups=[4,2]<=[8]", ("tensor",), 2),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'tensor'}", ("tensor",), 2),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data':(1)2}", ("data",), 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), 2),  # names of XLA's own
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data",), 4),
    ],
)
def test_every_way_to_write_groups_of_devices_gives_their_mesh_axes(groups, axes, size):
    one = the_one(f"f32[8]{{0}} all-reduce(%a), channel_id=1, {groups}, use_global_device_ids=true")
    assert (one.mesh_axes(MESH), one.size) == (axes, size)


def test_a_permute_has_the_mesh_axis_of_its_pairs():
    one = the_one("f32[8]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,2},{2,4},{4,6},{6,0}}")
    assert one.mesh_axes(MESH) == ("data",)
    assert one.sent == 32


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-gather", 24), ("all-reduce", 48), ("reduce-scatter", 96), ("all-to-all", 24)]
)
def test_a_device_sends_what_a_ring_sends(kind, sent):
    one = the_one(f"f32[8]{{0}} {kind}(%a), channel_id=1, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}")
    assert one.bytes == 32
    assert one.sent == sent


def test_a_start_is_asynchronous_unless_the_compiler_says_that_it_waits():
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}"
    line = f"(f32[1]{{0}}, f32[8]{{0}}) all-gather-start(%a), channel_id=1, {groups}"
    assert the_one(line).asynchronous
    assert the_one(line).arrays == (("f32", (8,)),)
    assert not the_one(line + ', backend_config={"is_sync":true}').asynchronous
    assert not the_one(f"f32[8]{{0}} all-gather(%a), channel_id=1, {groups}").asynchronous


FUSED = """
%start (p: f32[1]) -> f32[8] {
  %p = f32[1]{0} parameter(0)
  %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %s = f32[8]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%middle (p: f32[1]) -> f32[8] {
  %p = f32[1]{0} parameter(0)
  ROOT %g.1 = f32[8]{0} all-gather(%p), channel_id=7, backend_config={"async_collective_fusion_config":{}}
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %d = f32[8]{0} dynamic-slice(%r, %p), dynamic_slice_sizes={8}
}
"""


ON_A_SPARSECORE = """
%called (p: f32[1]) -> f32[8] {
  %p = f32[1]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=7, backend_config={"estimated_cycles":"1000"}
}
"""


def test_what_a_sparsecore_does_is_asynchronous_and_none_of_it_is_the_tensorcores_work():
    text = program(
        '((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%called',
        "((f32[1]{0}), f32[8]{0}) call-update(%x.0, %a)",
        'f32[8]{0} multiply(%a, %a), backend_config={"estimated_cycles":"10"}',
        "f32[8]{0} call-done(%x.1)",
        computations=ON_A_SPARSECORE,
    )
    (gather,) = collectives(text)
    assert (gather.kind, gather.asynchronous, gather.bytes) == ("all-gather", True, 32)
    assert cycles(Module.of(text)) == {"matmul": 0, "other": 10}


def test_a_transfer_spread_over_fusions_counts_once_and_a_fused_scatter_by_its_name():
    text = program(
        "f32[8]{0} fusion(%a), kind=kCustom, calls=%start",
        "f32[8]{0} fusion(%a), kind=kOutput, calls=%middle",
        "f32[8]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1",
        computations=FUSED,
    )
    gather, scatter = collectives(text)
    assert (gather.kind, gather.asynchronous, gather.bytes) == ("all-gather", True, 32)
    assert (scatter.kind, scatter.asynchronous, scatter.bytes) == ("reduce-scatter", False, 32)
    lines = summed([gather, scatter], MESH)
    assert [(line.kind, line.sent, line.asynchronous) for line in lines] == [
        ("reduce-scatter", 7 * 32, 0),
        ("all-gather", 28, 28),
    ]
