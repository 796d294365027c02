"""A stage without work in a tick computes nothing, where the exchanges of a chunk are among devices of one stage."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from axon.layout import Layout
from axon.nn import Routing
from axon.parallel.pipeline import Action, Interleaved, OneFOneB
from axon.parallel.pipeline.idle import IDLE, objection
from axon.parallel.pipeline.phases import phases
from axon.parallel.pipeline.region import PIPE
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama
from models.mixtral import Mixtral

SIZES = {"vocab": 64, "embed": 32, "layers": 4, "heads": 4, "kv_heads": 4, "mlp": 48}


def traced(layout, model=Llama(**SIZES)):
    """The table that runs, what its idle stages do, and of each tick's region whether its products are in a branch."""
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    program = Program(model, layout, AdamW(Constant(1e-3)), batch=16, seq=16, devices=devices)
    regions = list(products(program.trace().jaxpr.jaxpr))
    return program.evaluator.pipeline.table, program.choices[IDLE], [one for one in regions if one]


def products(jaxpr):
    """Of each region of stages, of each product on a stage whether it is in a branch."""
    for one in jaxpr.eqns:
        for body in core.jaxprs_in_params(one.params):
            own = one.primitive.name == "shard_map" and "pipeline/stage.py" in body.debug_info.func_src_info
            yield from [set(in_branches(body))] if own else products(body)


def in_branches(jaxpr, in_branch=False):
    for one in jaxpr.eqns:
        if one.primitive.name == "dot_general":
            yield in_branch
        for body in core.jaxprs_in_params(one.params):
            yield from in_branches(body, in_branch or one.primitive.name == "cond")


def busy(table):
    """Of each tick of a phase's body whether no stage is idle in any of its repetitions."""
    for start, actions, times in phases(table):
        ticks = table.action[start : start + len(actions) * times].reshape(times, len(actions), -1)
        yield from (ticks != Action.IDLE).all(axis=(0, 2)).tolist()


LAYOUTS = {
    "stages alone": Layout({"pipe": 4}, microbatches=4),
    "data": Layout({"pipe": 2, "data": 2}, microbatches=4),
    "split": Layout({"pipe": 2}, microbatches=4, schedule=Interleaved(2, split=True)),
}


@pytest.mark.few(name=("data",))
@pytest.mark.parametrize("name", LAYOUTS)
def test_idle_stages_have_no_products(name):
    table, choice, found = traced(LAYOUTS[name])
    assert choice == "leave their forward out; also leave their backward out"
    every = list(busy(table))
    assert not all(every)
    assert found == [{not one} for one in every]


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_stages_own_collectives_are_in_no_branch_and_named():
    _, choice, found = traced(Layout({"pipe": 2, "context": 2, "tensor": 2}, microbatches=4, context="ring"))
    reason = "its collectives are over 'context', 'tensor'; devices of this platform begin collectives in an order of"
    assert choice.startswith(f"compute a forward and drop it: {reason} their own; also compute a backward and drop it")
    assert found == [{False}] * len(found)


@pytest.mark.full
@pytest.mark.draws(1)
def test_rounds_of_experts_that_all_stages_agree_on_are_named():
    routing = Routing(4, 2, sequence_loss=0.01, global_loss=0.01, bias_rate=0.01)
    layout = Layout({"pipe": 2, "expert": 2}, microbatches=4, schedule=OneFOneB())
    _, choice, _ = traced(layout, Mixtral(**SIZES, routing=routing))
    reason = "a branch by stage would have pmax over 'pipe', in which all stages meet"
    assert choice.startswith(f"compute a forward and drop it: {reason}; also compute a backward and drop it: its coll")


@pytest.mark.parametrize("exchange", [lax.psum, lax.all_gather, lax.pmax])
def test_what_names_the_stages_is_never_in_a_branch(exchange):
    mesh = jax.make_mesh((2, 2), (PIPE, "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def of(axis):
        def body(x):
            return jax.checkpoint(lambda x: exchange(jnp.sin(x), axis))(x)

        specs = PartitionSpec(PIPE, "tensor")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        x = jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=jax.NamedSharding(mesh, specs))
        return objection(jax.make_jaxpr(mapped)(x).jaxpr, "gpu")

    assert of("tensor") is None
    assert f"over '{PIPE}'" in of(PIPE)
    assert "all stages meet" in of((PIPE, "tensor"))


def test_for_tpus_a_branch_takes_longer_than_it_saves():
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0).jaxpr
    assert "a branch copies what waits in slots" in objection(jaxpr, "tpu")
    assert objection(jaxpr, "gpu") is None
