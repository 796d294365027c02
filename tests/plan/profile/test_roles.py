"""What an instruction is for, by its text."""

import pytest

from axon.plan.hlo import Module
from axon.plan.profile.roles import (
    ARGUMENTS,
    BETWEEN,
    COLLECTIVES,
    CONTROL,
    COPIES,
    ELEMENTWISE,
    LOOPS,
    PRODUCTS,
    UNNAMED,
    UPDATE,
    WAITING,
    Roles,
)

ROLES = Roles(
    Module.of(
        """HloModule jit__train

%inside (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %x = f32[4]{0} add(%p, %p), metadata={op_name="jit(_train)/jvp(norm)/add"}
  ROOT %d = f32[4]{0} dot(%p, %x), metadata={op_name="jit(_train)/jvp(mlp)/dot_general"}
}

%body (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %in_loop = f32[4]{0} exponential(%q), metadata={op_name="while/body/exp"}
}

%sends (r: f32[4]) -> f32[8] {
  %r = f32[4]{0} parameter(0)
  ROOT %gather = f32[8]{0} all-gather(%r), channel_id=1, replica_groups={{0,1}}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="state.parameters['head']"}
  %fused.1 = f32[4]{0} fusion(%a), kind=kLoop, calls=%inside
  %again = f32[4]{0} tanh(%a), metadata={op_name="jit(_train)/transpose(jvp(mlp))/rematted_computation/mlp/tanh"}
  %loop = f32[4]{0} while(%again), condition=%c, body=%body, metadata={op_name="jit(_train)/jvp(loss)/while"}
  %begun = ((f32[4]), f32[8]) async-start(%a), calls=%sends
  %waited = f32[8]{0} async-done(%begun), calls=%sends
  %joined = f32[4]{0} all-reduce(%a), replica_groups={{0,1}}, metadata={op_name="jit(_train)/(sum:jvp(moe)/psum)"}
  %moved = f32[4]{0} copy(%again)
  %weight = f32[4]{0} negate(%a), metadata={op_name="state.parameters['head']"}
  %sum = f32[4]{0} add(%a, %a), metadata={op_name="jit(_train)/jvp()/add"}
  %adam = f32[4]{0} multiply(%a, %a), metadata={op_name="jit(_train)/mul"}
  ROOT %made = f32[4]{0} negate(%a)
}
"""
    )
)


@pytest.mark.parametrize(
    ("name", "module", "phase", "kind"),
    [
        ("fused.1", "mlp", "forward", PRODUCTS),
        ("again", "mlp", "recomputed", ELEMENTWISE),
        ("loop", "loss", "forward", LOOPS),
        ("in_loop", "loss", "forward", ELEMENTWISE),
        ("joined", "moe", "forward", COLLECTIVES),
        ("moved", "mlp", "recomputed", COPIES),
        ("weight", ARGUMENTS, "", ELEMENTWISE),
        ("sum", BETWEEN, "forward", ELEMENTWISE),
        ("adam", UPDATE, "", ELEMENTWISE),
        ("made", UNNAMED, "", ELEMENTWISE),
    ],
)
def test_an_instruction_has_the_module_of_its_name_or_of_what_is_around_it(name, module, phase, kind):
    role = ROLES.of(name)
    assert (role.module, role.phase, role.kind) == (module, phase, kind)


@pytest.mark.parametrize("name", ["begun", "waited"])
def test_what_starts_a_collective_or_waits_for_it_is_one(name):
    role = ROLES.of(name)
    assert (role.kind, role.collective.kind, role.rank) == (COLLECTIVES, "all-gather", WAITING)


def test_a_kernel_in_a_graph_of_launches_is_known_by_the_fusion_it_is_named_after_or_by_its_own_name():
    assert ROLES.of_kernel("fused_1", "") == ROLES.of("fused.1")
    assert ROLES.of_kernel("nvjet_tst_128x64_TNT", "loop").kind == PRODUCTS
    assert ROLES.of_kernel("nvjet_tst_128x64_TNT", "loop").module == "loss"
    assert ROLES.of_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "").rank == WAITING
    assert ROLES.of_kernel("some_kernel", "").module == UNNAMED
    assert ROLES.of_kernel("loop", "loop").rank == CONTROL
