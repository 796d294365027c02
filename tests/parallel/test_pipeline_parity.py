"""The numerics contract of pipelines: whatever the schedule, and whatever else is split, steps are those that autodiff
makes of the model on one device, and a run done again has the same bits.

The model has tied embeddings, packed documents and padding.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import parity
import pytest
from mechanisms import combined, joined
from parity import Expected, Problem

from axon.layout import Layout
from axon.parallel.pipeline import (
    Action,
    Cell,
    Chunks,
    DualPipeV,
    FromFile,
    GPipe,
    Interleaved,
    OneFOneB,
    Table,
    Work,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
)
from axon.parallel.pipeline.table import needs, result, step_of
from axon.parallel.pipeline.text import write
from models.llama import Llama

MICROBATCHES = 4
LLAMA = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
MODELS = {
    "two layers": replace(LLAMA, layers=2),
    "tied": LLAMA,
    "a head of its own": replace(LLAMA, tied=False),
    "12 layers": replace(LLAMA, layers=12),
}
PROBLEMS = {name: Problem(model, seq=16, steps=3, microbatches=MICROBATCHES) for name, model in MODELS.items()}

SCHEDULES: dict[str, Any] = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "interleaved": Interleaved(),
    "ZB-H1": ZeroBubbleH1(),
    "ZB-V": ZeroBubbleV(),
    "DualPipe-V": DualPipeV(),
}
MECHANISMS = ("zero 1", "zero 2", "zero 3", "tensor", "sequence", "overlap", "context", "replica", "on the host")
SETS = [(), *((name,) for name in MECHANISMS), ("zero 3", "sequence"), ("zero 3", "on the host")]
ALL = [(schedule, names) for names in SETS for schedule in SCHEDULES]
SHOWN = [("1F1B", ())]
FULL = [
    ("interleaved", ("zero 3",)),
    ("interleaved", ("on the host",)),
    ("ZB-H1", ("tensor",)),
    ("ZB-V", ("zero 1",)),
    ("DualPipe-V", ("context",)),
]


def marked(schedule: str, names: tuple[str, ...]) -> Any:
    case = schedule, names
    marks = [] if case in SHOWN else [pytest.mark.full] if case in FULL else [pytest.mark.slow]
    return pytest.param(*case, id=f"{schedule}: {joined(names) or 'alone'}", marks=marks)


def pipelined(schedule: Any, *names: str, stages: int = 2, **fields: Any) -> Layout:
    layout = combined(*names, "pipeline", microbatches=MICROBATCHES, schedule=schedule, **fields)
    return replace(layout, mesh={**layout.mesh, "pipe": stages})


@pytest.fixture(scope="module")
def on_one_device(packed_batch):
    """on_one_device(problem): what autodiff of the unpipelined step makes of it; drawn once."""
    return parity.once_each(PROBLEMS, packed_batch)


def compare(layout: Layout, expected: Expected) -> None:
    """Steps of a pipeline against the expected ones; done again, they have the same bits."""
    program, ours = parity.check(layout, expected)
    again = parity.train(program, program.begin(expected.parameters), expected.batches)
    jax.tree.map(np.testing.assert_array_equal, again.gradients, ours.gradients)
    assert again.metrics == ours.metrics


@pytest.mark.parametrize(("schedule", "names"), [marked(*case) for case in ALL])
def test_steps_do_not_depend_on_the_schedule_and_on_what_else_is_split(schedule, names, on_one_device):
    problem = "two layers" if (schedule, names) in SHOWN else "tied"
    compare(pipelined(SCHEDULES[schedule], *names), on_one_device(problem))


@pytest.mark.full
def test_a_head_of_its_own_is_trained_alike(on_one_device):
    compare(pipelined(OneFOneB(), "tensor", stages=4), on_one_device("a head of its own"))


# ---- tables of one's own ------------------------------------------------------------------------------------------


def random_table(rng: np.random.Generator, chunks: Chunks) -> Table:
    """In each tick every stage does some work that it could do, or nothing; some backwards whole and some split."""
    split = {
        (stage, i, c) for stage, i, c in np.ndindex(chunks.stages, MICROBATCHES, chunks.virtual) if rng.random() < 0.5
    }
    left = [list(works(stage, chunks, split)) for stage in range(chunks.stages)]
    cells, made, tick = [], set(), 0
    while any(left):
        done = set()
        for stage, todo in enumerate(left):
            steps = [step_of(stage, work, chunks) for work in todo]
            ready = [number for number, step in enumerate(steps) if made.issuperset(needs(step, chunks))]
            if ready and rng.random() < 0.8:
                number = int(rng.choice(ready))
                done.add(result(steps[number]))
                cells.append(Cell(tick, stage, todo.pop(number)))
        made |= done
        tick += 1
    return Table.of(cells, MICROBATCHES, chunks)


def works(stage: int, chunks: Chunks, split: set[tuple[int, int, int]]):
    for i, c in np.ndindex(MICROBATCHES, chunks.virtual):
        halves = (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT) if (stage, i, c) in split else (Action.BACKWARD,)
        yield from (Work(action, i, c) for action in (Action.FORWARD, *halves))


CHUNKS = [
    pytest.param(Chunks(2, 3), marks=pytest.mark.full),
    *(pytest.param(chunks, marks=pytest.mark.slow) for chunks in (Chunks(2, 3, "V"), Chunks(4), Chunks(4, 3, "V"))),
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_steps_do_not_depend_on_a_table_of_ones_own(chunks, rng, on_one_device, tmp_path):
    table = random_table(rng, chunks)
    check(table)
    (tmp_path / "mine.txt").write_text(write(table))
    layout = pipelined(FromFile(str(tmp_path / "mine.txt")), stages=chunks.stages, rows={"vocab": None})
    compare(layout, on_one_device("12 layers"))
