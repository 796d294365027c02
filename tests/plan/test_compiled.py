"""Reading programs: what is counted in a text that we know, and in programs that we compile."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon.plan.compiled import Collective, collectives, count_instructions, device_bytes

PROGRAM = """HloModule m

%all-reduce-scatter.1 (input.1: f32[8,4]) -> f32[2,4] {
  %input.1 = f32[8,4]{1,0} parameter(0)
  %all-reduce.3 = f32[8,4]{1,0} all-reduce(%input.1), channel_id=3, metadata={op_name="step/scatter"}
  ROOT %slice.5 = f32[2,4]{1,0} slice(%all-reduce.3), slice={[0:2], [0:4]}
}

%fused_gather (p: bf16[4]) -> bf16[16] {
  %p = bf16[4]{0} parameter(0)
  %all-gather.7 = bf16[16]{0} all-gather(%p), channel_id=7, metadata={op_name="step/gather"}
  ROOT %started = bf16[16]{0} custom-call(%all-gather.7), custom_call_target="AsyncCollectiveStart"
}

%fused_gather.1 (p.1: bf16[4]) -> bf16[16] {
  %p.1 = bf16[4]{0} parameter(0)
  ROOT %all-gather.8 = bf16[16]{0} all-gather(%p.1), channel_id=7, async_collective_fusion_config={}
}

ENTRY %main (a: f32[8,4], b: f32[4]) -> f32[] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %scattered = f32[2,4]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %begun = bf16[16]{0} fusion(%b), kind=kCustom, calls=%fused_gather
  %meanwhile = bf16[16]{0} fusion(%b), kind=kOutput, calls=%fused_gather.1
  %sums = (f32[4]{0}, f32[]) all-reduce-start(%b, %b), channel_id=1, metadata={op_name="step/sum"}
  %gather = (bf16[4]{0}, bf16[32]{0}) all-gather-start(%b), channel_id=9, metadata={op_name="step/async"}
  %one = f32[2]{0} reduce-scatter(%b), channel_id=1, metadata={op_name="step/rs"}
  %two = f32[2]{0} reduce-scatter(%b), channel_id=1, metadata={op_name="step/rs"}
  ROOT %out = f32[] constant(0)
}
"""


def test_a_fused_all_reduce_scatter_is_a_reduce_scatter_and_copies_of_a_gather_are_one():
    assert [(one.kind, one.arrays, one.source) for one in collectives(PROGRAM)] == [
        ("reduce-scatter", (("f32", (2, 4)),), "step/scatter"),
        ("all-gather", (("bf16", (16,)),), "step/gather"),
        ("all-reduce", (("f32", (4,)), ("f32", ())), "step/sum"),
        ("all-gather", (("bf16", (32,)),), "step/async"),
        ("reduce-scatter", (("f32", (2,)),), "step/rs"),
        ("reduce-scatter", (("f32", (2,)),), "step/rs"),
    ]


def test_bytes_are_those_of_all_results():
    assert Collective("all-reduce", (("f32", (4, 2)), ("bf16", (3,)), ("s32", ())), "").bytes == 32 + 6 + 4


def test_every_line_that_defines_a_value_is_an_instruction():
    assert count_instructions(PROGRAM) == 18


def test_a_real_program_has_the_collective_that_was_asked_for():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: jax.sharding.reshard(x, PartitionSpec())).lower(x).compile()
    (gather,) = collectives(compiled.as_text())
    assert (gather.kind, gather.bytes) == ("all-gather", 16 * 32 * 4)


def test_device_bytes_hold_arguments_and_results_once_where_they_share_memory(rng):
    x = jax.ShapeDtypeStruct((int(rng.integers(100, 1000)), 1024), jnp.float32)
    apart = jax.jit(lambda x: x + 1).lower(x).compile()
    shared = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    assert device_bytes(apart) - device_bytes(shared) == x.size * 4
