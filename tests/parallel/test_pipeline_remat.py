"""What a pipeline keeps of a chunk changes no gradient, whatever the schedule: remat by name, minimal and offloaded;
split backwards, two chunks a stage, and layers that go down the stages and up again."""

import math
from dataclasses import replace

import jax
import parity
import pytest
from mechanisms import combined
from parity import Problem

from axon.layout import Execution, Layout
from axon.parallel.pipeline import Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV, figures
from axon.plan.flops import flops_by_module
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

LLAMA = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
PROBLEMS = {"remat none": Problem(LLAMA, seq=16, steps=1)}
OFFLOADED = {"gate": "offload", "input": "offload", "attention": "save"}
CASES = [
    (Interleaved(2, split=True), OFFLOADED, ()),
    (Interleaved(2), "minimal", ("zero 3",)),
    (Interleaved(2, split=True), ("query", "gate"), ("tensor",)),
    (ZeroBubbleV(), OFFLOADED, ("zero 1",)),
    (ZeroBubbleV(), "minimal", ("tensor",)),
    (ZeroBubbleH1(), ("attention", "up"), ()),
]


@pytest.fixture(scope="module")
def expected(packed_batch):
    """expected(problem): what one device makes of it, where nothing is computed again."""
    return parity.once_each(PROBLEMS, packed_batch)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "remat", "names"), CASES, ids=str)
def test_gradients_do_not_depend_on_what_waits(schedule, remat, names, expected):
    of_one = expected("remat none")
    problem = replace(of_one.problem, execution=Execution(remat=remat))
    layout = combined(*names, "pipeline", schedule=schedule)
    program, _ = parity.check(layout, replace(of_one, problem=problem))
    assert ("offload" in program.choices) == (remat is OFFLOADED)


NAMES = ("query", "key", "value", "attention", "gate")


def executed(schedule, remat):
    """FLOPs of the blocks in a traced step, bubble apart; without a schedule of the model without stages."""
    layout = Layout({"pipe": 2, "tensor": 2} if schedule else {"tensor": 2}, microbatches=4, schedule=schedule)
    model, devices = replace(LLAMA, tied=False), jax.devices()[: math.prod(layout.mesh.values())]
    options = {"batch": 8, "seq": 32, "devices": devices, "execution": Execution(remat=remat)}
    program = Program(model, layout, AdamW(Constant(1e-3)), **options)
    flops = flops_by_module(program.trace().jaxpr.jaxpr)
    found = figures(program.evaluator.pipeline.table) if schedule else None
    return (flops["attention"] + flops["mlp"]) / (found.lockstep / found.busy.max() if found else 1)


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_the_forward_computed_is_not_computed_again():
    """With remat none a step's products are the model's, also where backwards are split; names keep what they name."""
    whole = executed(None, "none")
    for schedule in (OneFOneB(), Interleaved(2, split=True), ZeroBubbleV()):
        none, some, full = (executed(schedule, remat) for remat in ("none", NAMES, "full"))
        assert whole <= none <= 1.03 * whole, schedule
        assert 1.05 * none < some < full <= 1.34 * none, schedule
