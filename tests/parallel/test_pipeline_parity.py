"""The numerics contract of pipelines: whatever the schedule, and whatever else is split, steps are those that autodiff
makes of the model on one device, and a run done again has the same bits.

The model has tied embeddings, packed documents and padding.
"""

import math
import secrets
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from axon.layout import Layout, sequence_parallel
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
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
SEQUENCES, SEQ, MICROBATCHES, STEPS = 16, 16, 4, 3
OPTIMIZER = AdamW(Constant(1e-3), eps=1e-4, clip=None)  # see test_parity

SCHEDULES: dict[str, Any] = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "interleaved": Interleaved(),
    "ZB-H1": ZeroBubbleH1(),
    "ZB-V": ZeroBubbleV(),
    "DualPipe-V": DualPipeV(),
}
MECHANISMS: dict[str, dict[str, Any]] = {
    "alone": {},
    "zero 1": {"mesh": {"data": 2}, "zero": 1},
    "zero 2": {"mesh": {"data": 2}, "zero": 2},
    "zero 3": {"mesh": {"data": 2}, "zero": 3},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"tensor": 2}, "rows": sequence_parallel()},
    "overlap": {"mesh": {"tensor": 2}, "rows": sequence_parallel(), "overlap": ("tensor",)},
    "context": {"mesh": {"context": 2}},
    "replica": {"mesh": {"replica": 2, "data": 2}, "zero": 3},
    "zero 3 and sequence": {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()},
}
ALL = [(schedule, mechanism) for mechanism in MECHANISMS for schedule in SCHEDULES]
SHOWN = [("1F1B", "sequence")]
FULL = [
    ("interleaved", "sequence"),
    *(("1F1B", mechanism) for mechanism in ("zero 1", "zero 3", "tensor", "replica")),
    *zip(SCHEDULES, ("alone", "replica", "zero 3", "tensor", "zero 1", "context"), strict=True),
]


def marked(pair: tuple[str, str]) -> Any:
    marks = [] if pair in SHOWN else [pytest.mark.full] if pair in FULL else [pytest.mark.slow]
    return pytest.param(*pair, marks=marks)


def pipelined(schedule: Any, mesh: Any = (), stages: int = 2, **fields: Any) -> Layout:
    return Layout({"pipe": stages, **dict(mesh)}, microbatches=MICROBATCHES, schedule=schedule, **fields)


def devices(layout: Layout) -> list[Any]:
    return jax.devices()[: math.prod(layout.mesh.values())]


def train(program: Program, batches: list[Any]) -> tuple[Any, np.ndarray]:
    """First gradients, and loss and norm of the gradients of every step."""
    state, curve, gradients = program.init(), [], None
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
        if gradients is None:  # Adam's first moment after one step is (1 − b1) of the gradient
            moment = state.optimizer["direction"].mu
            gradients = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER.b1), moment)
    return gradients, np.asarray(curve)


@pytest.fixture(scope="module")
def on_one_device(packed_batch):
    """on_one_device(model): a seed, batches, and what autodiff of the unpipelined step makes of them; drawn once."""
    done = {}

    def expected(model: Any) -> Any:
        if model not in done:
            seed = secrets.randbits(31)
            rng = np.random.default_rng(seed)
            batches = [packed_batch(rng, SEQUENCES, SEQ, model.vocab) for _ in range(STEPS)]
            layout = Layout({"data": 1}, microbatches=MICROBATCHES)
            one = Program(model, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, devices=devices(layout))
            done[model] = seed, batches, train(one, batches)
        return done[model]

    return expected


def compare(layout: Layout, expected: Any, model: Any = MODEL) -> None:
    """Steps of a pipeline against the expected ones; done again, they have the same bits."""
    seed, batches, (gradients, curve) = expected
    print(f"seed {seed}")
    program = Program(model, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, devices=devices(layout))
    ours, our_curve = train(program, batches)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(gradients), strict=True):
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    np.testing.assert_allclose(our_curve, curve, rtol=1e-5)
    again, again_curve = train(program, batches)
    jax.tree.map(np.testing.assert_array_equal, again, ours)
    np.testing.assert_array_equal(again_curve, our_curve)


@pytest.mark.parametrize(("schedule", "mechanism"), list(map(marked, ALL)))
def test_steps_do_not_depend_on_the_schedule_and_on_what_else_is_split(schedule, mechanism, on_one_device):
    compare(pipelined(SCHEDULES[schedule], **MECHANISMS[mechanism]), on_one_device(MODEL))


@pytest.mark.full
def test_a_head_of_its_own_is_trained_alike(on_one_device):
    model = replace(MODEL, tied=False)
    compare(pipelined(OneFOneB(), {"tensor": 2}, stages=4), on_one_device(model), model)


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
    pytest.param(Chunks(2, 3, "V"), marks=pytest.mark.full),
    *(pytest.param(chunks, marks=pytest.mark.slow) for chunks in (Chunks(2, 3), Chunks(4), Chunks(4, 3, "V"))),
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_steps_do_not_depend_on_a_table_of_ones_own(chunks, rng, on_one_device, tmp_path):
    table = random_table(rng, chunks)
    check(table)
    (tmp_path / "mine.txt").write_text(write(table))
    model = replace(MODEL, layers=12)
    layout = pipelined(FromFile(str(tmp_path / "mine.txt")), stages=chunks.stages, rows={"vocab": None})
    compare(layout, on_one_device(model), model)
