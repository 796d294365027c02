"""Each way to split a step, compiled for real targets: it sends what its program says, and nothing more is kept.

The program's own bytes are held against formulas in `test_traffic.py` and `test_volumes.py`; here what three compilers
make of it. XLA may add up what several collectives would sum, make an all-reduce of a reduce-scatter (twice the bytes)
or a ring of permutes (as many), and take a gather out of a loop; it may not send what nobody asked for.
"""

import math
from collections import Counter

import pytest

from axon.layout import Execution, Layout, sequence_parallel, tensor_3d
from axon.plan.report import compile_step
from axon.plan.topology import devices
from axon.plan.traffic import step_communication
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=8192, embed=2048, layers=2, heads=16, kv_heads=16, mlp=4096)
BATCH, SEQ = 32, 256
TARGETS = {"v5e:4x4": 16, "v5p:2x2x4": 16, "h200:8": 8}
COMPILERS = {"v": "libtpu", "h": "jax_plugins.xla_cuda13"}


def split(outer, count, **layout):
    """The rest of `count` devices on the mesh axis `outer`, besides those that the layout names."""
    mesh = layout.pop("mesh", {})
    return Layout({outer: count // math.prod(mesh.values()), **mesh}, **layout)


SEQUENCE = {"mesh": {"tensor": 4}, "rows": sequence_parallel()}
THREE = {"mesh": {"z": 2, "x": 2, "y": 2}, **tensor_3d()}
MECHANISMS = {
    "data": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2, "microbatches": 2},
    "zero 3": {"zero": 3},
    "replicas": {"mesh": {"replica": 2}, "zero": 3},
    "tensor": {"mesh": {"tensor": 4}},
    "sequence": SEQUENCE,
    "overlap": {**SEQUENCE, "overlap": ("tensor",)},
    "three-dimensional": THREE,
    "zero 3, sequence": {**SEQUENCE, "zero": 3},
    "zero 3, overlap, microbatches": {**SEQUENCE, "overlap": ("tensor",), "zero": 3, "microbatches": 2},
    "zero 1, three-dimensional": {**THREE, "zero": 1},
}


def some(pairs, *fast):
    return [pair if pair in fast else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "target"),
    some([(name, target) for name in MECHANISMS for target in TARGETS], ("sequence", "h200:8")),
)
def test_a_compiled_step_sends_what_its_program_says_and_keeps_what_its_layout_says(name, target):
    pytest.importorskip(COMPILERS[target[0]], reason="needs its compiler: scripts/setup compilers")
    layout = split("data", TARGETS[target], **MECHANISMS[name])
    options = {"execution": Execution(remat="full"), "devices": devices(target)}
    program = Program(MODEL, layout, AdamW(Constant(1e-3)), batch=BATCH, seq=SEQ, **options)
    report, _ = compile_step(program, target)
    check_memory(program, report.memory)
    check_bytes(program, report)


def check_memory(program, memory):
    """Every parameter and moment is cut as its row says: nothing is replicated that should not be."""
    kept = {
        kind: sum(4 * math.prod(spec.shape) // split_ways(program, spec, kind) for spec in program.parameters.values())
        for kind in ("params", "optimizer")
    }
    assert memory["parameters"] == kept["params"]
    assert memory["optimizer"] == pytest.approx(2 * kept["optimizer"], abs=64)
    assert memory["temporaries"] < memory["available"] / 2


def split_ways(program, spec, kind):
    axes = [axis for name in spec.axes for axis in program.placement.mesh_axes(name, kind)]
    return math.prod(program.placement.mesh.shape[axis] for axis in axes)


def check_bytes(program, report):
    """For each mesh axis: at most what the program says, its scatters twice; at least half, a gather once a loop.

    A compiler may make one sum over two mesh axes of a sum over the one and then over the other.
    """
    least, most, sent = Counter(), Counter(), Counter()
    for one in step_communication(program).transfers:
        size = one.bytes * one.times
        most[one.mesh_axes] += size * (2 if one.kind == "reduce-scatter" else 1)
        least[one.mesh_axes] += size / 2 if one.kind != "all-gather" else size / one.times
    for one in report.collectives:
        sent[one.mesh_axes] += one.sent
    total = sum(most.values())
    assert sum(sent.values()) <= 1.05 * total
    for axes in {*most, *sent}:
        within = sum(size for part, size in most.items() if {*part} <= {*axes})
        around = sum(size for whole, size in sent.items() if {*whole} >= {*axes})
        assert sent[axes] <= 1.05 * within + 0.02 * total, (axes, sent, most)
        assert around >= 0.95 * least[axes] - 0.02 * total, (axes, sent, least)
