"""The dtype in which gradients are summed over devices: what was asked for, for every weight, on every ZeRO stage."""

import math

import pytest

from axon.layout import Execution, Layout, Placement
from axon.plan.compiled import collectives
from axon.plan.equations import sends
from axon.plan.flops import bodies_of
from axon.precision import Precision
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.gpt2 import GPT2
from models.llama import Llama

LLAMA = Llama(vocab=32, embed=16, layers=2, heads=2, kv_heads=2, mlp=32)
GPT = GPT2(vocab=32, embed=16, layers=2, heads=2, mlp=32, positions=16)
SUMS = ("all-reduce", "reduce-scatter")


def program(model, reduce, zero, **where):
    layout = Layout({"data": 4, "tensor": 2}, zero=zero, microbatches=where.pop("microbatches", 1))
    where = where or {"placement": Placement.described(layout, 8)}
    where |= {"precision": Precision("bfloat16", reduce), "execution": Execution(unroll=True)}
    return Program(model, layout, AdamW(Constant(1e-3)), batch=32, seq=16, **where)


def equations(jaxpr, times=1):
    """Every equation without bodies, and how often it runs."""
    for equation in jaxpr.eqns:
        often = times * equation.params["length"] if equation.primitive.name == "scan" else times
        bodies = list(bodies_of(equation.params))
        for body in bodies:
            yield from equations(body, often)
        if not bodies:
            yield equation, times


def summed_over_data(program):
    """Dtype → elements of the arrays that a traced step sums over `data`; one number a microbatch is left out."""
    found = {}
    for equation, times in equations(program.trace().jaxpr.jaxpr):
        operand, out = equation.invars[:1], equation.outvars[0].aval
        for one in sends(equation)[0]:
            if one.kind in SUMS and "data" in one.mesh_axes and out.size > program.runtime.layout.microbatches:
                dtype = operand[0].aval.dtype.name
                found[dtype] = found.get(dtype, 0) + times * operand[0].aval.size
    return found


@pytest.mark.few(zero=(0, 3))
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", range(4))
def test_every_gradient_is_summed_once_in_the_dtype_that_was_asked_for(zero, reduce):
    one = program(LLAMA, reduce, zero)
    assert summed_over_data(one) == {reduce: sum(math.prod(spec.shape) for spec in one.parameters.values())}


@pytest.mark.parametrize("zero", range(4))
def test_those_of_biases_scales_positions_and_of_a_tied_head_too(zero):
    one = program(GPT, "bfloat16", zero)
    found, size = summed_over_data(one), sum(math.prod(spec.shape) for spec in one.parameters.values())
    assert found.keys() == {"bfloat16"}
    # With ZeRO-3 both gradients of the tied table are summed: that of the look-up, and that of the head.
    assert found["bfloat16"] == size + (32 * 16 if zero == 3 else 0)


@pytest.mark.parametrize(("zero", "times"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_microbatches_add_up_in_float32_and_are_summed_once_or_as_they_come_where_gradients_are_split(zero, times):
    one = program(LLAMA, "bfloat16", zero, microbatches=2)
    size = sum(math.prod(spec.shape) for spec in one.parameters.values())
    assert summed_over_data(one) == {"bfloat16": times * size}
    adds = [
        e.outvars[0].aval for e, often in equations(one.trace().jaxpr.jaxpr) if e.primitive.name == "add" and often == 2
    ]
    sums = [a for a in adds if a.shape == one.parameters["embedding/table"].shape]
    assert sums
    assert {a.dtype.name for a in sums} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_so_does_the_program_that_a_tpu_runs(zero):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    from axon.plan.topology import devices

    one = program(LLAMA, "bfloat16", zero, devices=devices("v5e:2x4"))
    mesh, kinds = dict(one.placement.mesh.shape), (*SUMS, "collective-permute")
    sent = [c for c in collectives(one.lower().compile().as_text()) if c.kind in kinds and "data" in c.mesh_axes(mesh)]
    large = [dtype for c in sent for dtype, shape in c.arrays if math.prod(shape) > 64]
    assert large
    assert set(large) == {"bf16"}
