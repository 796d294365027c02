"""The numerics contract for layouts that nobody thought of: drawn at random over every mesh axis and every field.

What cannot be is refused with a `UserError` before anything is traced; what can be trains as on one device.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from mechanisms import DEVICES, EVERY, ORDER, HostLayout
from parity import Expected, Problem, check, once_each

from axon.errors import UserError
from axon.layout import Execution, Layout, sequence_parallel
from axon.layout.table import CONTEXT
from axon.nn import Routing
from axon.parallel.pipeline import DualPipeV, GPipe, Interleaved, OneFOneB, ZeroBubbleH1, ZeroBubbleV
from models.llama import Llama
from models.mixtral import Mixtral

SIZES: dict[str, Any] = {"vocab": 64, "embed": 32, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 32}
ROUTING = Routing(8, 2, sequence_loss=0.01, global_loss=0.01, z_loss=0.001)
PROBLEMS = {
    "dense": Problem(Llama(**SIZES), steps=3, execution=Execution(unroll=False)),
    "experts": Problem(Mixtral(**SIZES, routing=ROUTING), steps=3, execution=Execution(remat="full", unroll=False)),
}
AXES = ("replica", "data", "tensor", "pipe", "context", "ulysses", "expert")
SCHEDULES = (None, GPipe(), OneFOneB(), Interleaved(2), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV())
FACTORS = (1.0, 1.5, 4.0)


def drawn_mesh(draw: random.Random) -> dict[str, int]:
    """Several mesh axes, over some or all devices."""
    while True:
        mesh = {axis: size for axis in AXES if (size := draw.choice((1, 1, 1, 2, 2, 4))) > 1}
        if len(mesh) > 1 and math.prod(mesh.values()) in (DEVICES // 2, DEVICES):
            return mesh


def drawn_fields(draw: random.Random) -> dict[str, Any]:
    """All of a layout, perhaps what no layout can be."""
    mesh = drawn_mesh(draw)

    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if draw.random() < chance else otherwise

    folded = sometimes(0.3, EVERY["folded"], {"rows": {}, "params": {}})
    return {
        "mesh": mesh,
        "zero": draw.randrange(4),
        "microbatches": draw.choice((1, 2, 4)),
        "schedule": sometimes(0.9 if "pipe" in mesh else 0.05, draw.choice(SCHEDULES), None),
        "pad_layers": sometimes(0.7, True, False),
        "context": sometimes(0.9 if {"context", "ulysses"} & {*mesh} else 0.05, draw.choice((None, *CONTEXT)), None),
        "overlap": sometimes(0.3, ("tensor",), ()),
        "replicate_kv": sometimes(0.1, 2, 1),
        "auto": sometimes(0.1, True, False),
        "host": sometimes(0.1, draw.choice((("optimizer",), ("params", "optimizer"))), ()),
        "rows": folded["rows"] | sometimes(0.5, sequence_parallel(), {}),
        "params": folded["params"],
        "order": ORDER,
    }


def possible_layout(draw: random.Random, problem: Problem) -> Layout:
    """The first that is not refused."""
    while True:
        fields = drawn_fields(draw)
        print(fields)
        try:
            layout = HostLayout(**fields)
            problem.program(layout)
            return layout
        except UserError as refused:
            print(refused)


@pytest.fixture(scope="module")
def expected(packed_batch):
    """expected(problem): what one device makes of it, once for all layouts."""
    return once_each(PROBLEMS, packed_batch)


def check_drawn(draw: random.Random, expected: Expected) -> None:
    problem = expected.problem
    if isinstance(problem.model, Mixtral):
        execution = replace(problem.execution, capacity_factor=draw.choice(FACTORS))
        problem = replace(problem, execution=execution)
    check(possible_layout(draw, problem), replace(expected, problem=problem))


@pytest.mark.full
@pytest.mark.some(number=(0,))
@pytest.mark.parametrize(("problem", "number"), [("dense", 0), ("dense", 1), *(("experts", n) for n in (0, 1, 8, 10))])
def test_gradients_and_steps_do_not_depend_on_a_layout_drawn_once(problem, number, expected):
    check_drawn(random.Random(number), expected(problem))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_and_steps_do_not_depend_on_a_layout_drawn_now(problem, number, seed, expected):
    check_drawn(random.Random(seed + number), expected(problem))


@pytest.mark.full
def test_layouts_that_cannot_be_are_refused_before_anything_is_traced(seed):
    draw = random.Random(seed)
    for problem in PROBLEMS.values():
        for _ in range(20):
            possible_layout(draw, problem)
