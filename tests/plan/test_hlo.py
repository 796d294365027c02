"""Reading HLO text: what runs, how often, and what the compiler says of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from axon.plan.hlo import Module, array_bytes, arrays

LOOPS = """HloModule m

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %work = f32[4]{0} fusion(%p), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[], f32[4]) tuple(%p, /*index=1*/%work)
}

%cond (q: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %q = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%inside (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  ROOT %m = f32[4]{0} multiply(%r, %r), backend_config={"estimated_cycles":"1000"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %start = (s32[], f32[4]) tuple(%a, %a)
  %loop = (s32[], f32[4]) while(%start), condition=%cond, body=%body
  %told = (s32[], f32[4]) while(%loop), condition=%other, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %never = (s32[], f32[4]) while(%loop), condition=%other, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%told), index=1, backend_config={"estimated_cycles":"9223372036854775807"}
}
"""


def test_a_loop_runs_as_often_as_its_condition_or_the_compiler_says():
    module = Module.of(LOOPS)
    work = [one.times for one in module.scheduled if one.instruction.name == "work"]
    assert work == [5, 3, 1]
    assert module.unknown_loops == {"never": 1}


@pytest.mark.parametrize(("raised", "times"), [("%two", 3), ("%three", 2), ("%other", 5)])
def test_of_a_loop_whose_body_has_several_rounds_they_are_counted_as_one(raised, times):
    rounds = """  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(1)
  %both = s32[] constant(2)
  %two = s32[] add(%i, %both)
  %three = s32[] add(%two, %one)
  %other = s32[] multiply(%i, %both)
"""
    text = LOOPS.replace("  %work =", rounds + "  %work =", 1).replace("tuple(%p, /*", f"tuple({raised}, /*")
    work = [one.times for one in Module.of(text).scheduled if one.instruction.name == "work"]
    assert work[0] == times


def test_a_loop_that_a_load_of_experts_within_capacity_never_enters_counts_as_nothing():
    inner = "  ROOT %t = (s32[], f32[4]) while(%p), condition=%other, body=%inside\n"
    named = LOOPS.replace("  ROOT %t = (s32[], f32[4]) tuple(%p, /*index=1*/%work)\n", inner).replace(
        "body=%body\n  ROOT", 'body=%body, metadata={op_name="jit(step)/moe/overflow_rounds/while"}\n  ROOT'
    )
    module = Module.of(named)
    assert [one.times for one in module.scheduled if one.instruction.name == "work"] == [5, 3, 0]
    assert module.unknown_loops == {"t": 1, "never": 0}


def test_cycles_are_those_of_what_is_scheduled_and_a_sentinel_is_none():
    module = Module.of(LOOPS)
    assert sum(one.instruction.cycles * one.times for one in module.scheduled) == 7 * (5 + 3 + 1)


def test_an_instruction_has_its_operands_without_types_and_comments():
    (tuple_,) = (one for one in Module.of(LOOPS).computations["body"] if one.name == "t")
    assert (tuple_.opcode, tuple_.operands) == ("tuple", ("p", "work"))
    assert tuple_.arrays == (("s32", ()), ("f32", (4,)))


def test_bytes_of_a_type_are_those_of_all_its_arrays():
    assert array_bytes(arrays("(bf16[3,5]{1,0:T(8,128)(2,1)}, f32[7]{0}, pred[2], s32[])")) == 30 + 28 + 2 + 4


@pytest.mark.parametrize("length", [2, 9])
def test_a_scan_of_a_real_program_runs_as_often_as_it_is_long(length):
    def stepped(x):
        return lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, None, length=length)[0]

    text = jax.jit(stepped).lower(jnp.ones((64, 64))).compile().as_text()
    module = Module.of(text)
    assert not module.unknown_loops
    loops = [module.trips(one.instruction) for one in module.scheduled if one.instruction.opcode == "while"]
    assert loops == [length]
