"""The numerics contract of tuning: objectives of answers and frozen models, on every layout and with every reference.

Sequences have from none to several examples, of texts of random lengths; adapters and frozen models are drawn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest
from mechanisms import combined, joined
from parity import ONE, Problem, assert_metrics_agree, check, once_each, train

from axon.layout import Execution
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.parallel.pipeline import TwoBW
from axon.train.adapters_off import AdaptersOff
from axon.train.contrastive import InfoNCE
from axon.train.distillation import Distillation
from axon.train.kto import KTO
from axon.train.optimizers import AdamW, Constant
from axon.train.preference import CPO, DPO, IPO, ORPO, Reward, SimPO
from axon.tune import RewardModel
from axon.tune.packing import EMPTY, Document, Example, batch_of
from models.llama import Llama
from models.mixtral import Mixtral

SIZES: dict[str, Any] = {"vocab": 61, "vocab_multiple": 64, "embed": 32, "heads": 8, "kv_heads": 4, "layers": 2}
LLAMA = Llama(**SIZES, mlp=64, tied=True)
ANOTHER = replace(LLAMA, embed=48, layers=4, mlp=32, tied=False)
EXPERTS = Mixtral(**SIZES, mlp=16, routing=Routing(8, 2, sequence_loss=0.01, z_loss=0.001), shared=16)
LORA = LoRA("layers/*", rank=4)
ROOM = 3
"""Examples that a sequence may have."""

DIFFERENCES = dict.fromkeys(("margin", "chosen", "rejected", "kl"), 2 * math.log(SIZES["vocab"]))
"""Of log-probabilities of answers of two tokens."""

FROZEN = {"reference": ANOTHER}
ADAPTERS_OFF: dict[str, Any] = {"transforms": (LORA,), "references": {"reference": AdaptersOff()}}


@dataclass(frozen=True)
class Answers(Problem):
    """Batches of examples that have two or three texts, of which some objectives leave one out."""

    steps: int = 3
    subtracted: Mapping[str, float] = field(default_factory=lambda: DIFFERENCES)

    def batches(self, rng: np.random.Generator, packed_batch: Any) -> list[Any]:
        def row() -> list[Example]:
            return [self._example(rng) for _ in range(rng.integers(0, ROOM + 1))]

        rows = [[row() for _ in range(self.sequences)] for _ in range(self.steps)]
        return [batch_of(each, self.seq, self.objective.documents) for each in rows]

    def _example(self, rng: np.random.Generator) -> Example:
        texts = [self._text(rng) for _ in range(self.objective.sides)]
        if isinstance(self.objective, KTO):
            texts[rng.integers(2)] = EMPTY
        elif isinstance(self.objective, InfoNCE) and rng.random() < 0.5:
            texts[2] = EMPTY
        return Example(tuple(texts), "")

    def _text(self, rng: np.random.Generator) -> Document:
        """One of up to three predictions, of which the first is of its prompt, so that nine fit into a sequence."""
        ids = rng.integers(0, SIZES["vocab"], rng.integers(3, 5))
        return Document(ids, (np.arange(len(ids)) > 1).astype(np.float32))


PROBLEMS = {
    "DPO": Answers(LLAMA, DPO(pairs=ROOM), references=FROZEN),
    "DPO, adapters off": Answers(LLAMA, DPO(pairs=ROOM, beta=0.5), **ADAPTERS_OFF),
    "DPO of experts, adapters off": Answers(
        EXPERTS, DPO(pairs=ROOM), execution=Execution(unroll=False), **ADAPTERS_OFF
    ),
    "IPO": Answers(LLAMA, IPO(pairs=ROOM), **ADAPTERS_OFF),
    "SimPO": Answers(LLAMA, SimPO(pairs=ROOM)),
    "ORPO": Answers(LLAMA, ORPO(pairs=ROOM)),
    "CPO": Answers(LLAMA, CPO(pairs=ROOM)),
    "Reward": Answers(RewardModel(LLAMA), Reward(pairs=ROOM, margin=0.1, centring=0.02)),
    "KTO": Answers(LLAMA, KTO(examples=ROOM), references=FROZEN),
    "KTO, adapters off": Answers(LLAMA, KTO(examples=ROOM, beta=0.5), **ADAPTERS_OFF),
    "InfoNCE": Answers(LLAMA, InfoNCE(examples=ROOM, temperature=0.5)),
    "distilled": Problem(
        LLAMA, Distillation(2.0, next_token=0.5), steps=3, references={"teacher": replace(ANOTHER, embed=32)}
    ),
}

Case = tuple[str, ...]

ALONE = [
    *[(name,) for name in ("zero 1", "zero 2", "zero 3", "tensor", "context", "ring", "ulysses", "pipeline")],
    ("zero 3", "microbatches"),
]
TOGETHER = [
    ("zero 3", "tensor", "microbatches"),
    ("zero 2", "sequence", "ring"),
    ("pipeline", "zero 3", "overlap"),
    ("interleaved", "zero 1", "ulysses"),
    ("replica", "tensor"),
]
OF_EXPERTS = [
    ("expert", "zero 3"),
    ("expert", "pipeline"),
    ("expert", "zero 2", "ring", "microbatches"),
    ("folded", "zero 1"),
]
FULL: list[Case] = [
    ("DPO", "zero 3", "tensor", "microbatches"),
    ("DPO", "pipeline", "zero 3", "overlap"),
    ("DPO, adapters off", "pipeline"),
    ("DPO, adapters off", "zero 2", "sequence", "ring"),
    ("DPO, adapters off", "interleaved", "zero 1", "ulysses"),
    ("DPO of experts, adapters off", "expert", "pipeline"),
    ("IPO", "pipeline", "zero 3", "overlap"),
    ("SimPO", "zero 2", "sequence", "ring"),
    ("ORPO", "interleaved", "zero 1", "ulysses"),
    ("CPO", "zero 3", "tensor", "microbatches"),
    ("Reward", "pipeline", "zero 3", "overlap"),
    ("KTO", "interleaved", "zero 1", "ulysses"),
    ("KTO, adapters off", "pipeline"),
    ("InfoNCE", "pipeline", "zero 3", "overlap"),
    ("distilled", "pipeline", "zero 3", "overlap"),
]
ALL: list[Case] = [
    *[(name, *names) for name in PROBLEMS if "experts" not in name for names in (*ALONE, *TOGETHER)],
    *[("DPO of experts, adapters off", *names) for names in OF_EXPERTS],
]


def marked() -> list[Any]:
    def parameter(case: Case) -> Any:
        problem, *names = case
        mark = pytest.mark.full if case in FULL else pytest.mark.slow
        return pytest.param(problem, names, id=f"{problem}: {joined(names)}", marks=mark)

    return [parameter(case) for case in dict.fromkeys([*FULL, *ALL])]


@pytest.fixture(scope="module")
def expected(packed_batch):
    """expected(problem): what one device makes of it, once for all layouts."""
    return once_each(PROBLEMS, packed_batch)


@pytest.mark.draws(3)
@pytest.mark.parametrize(("problem", "names"), marked())
def test_gradients_and_steps_do_not_depend_on_the_layout(problem, names, expected):
    check(combined(*names), expected(problem))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("problem", ["KTO", "distilled", "DPO, adapters off"])
def test_an_evaluation_on_stages_is_that_of_one_device(problem, expected):
    one, found = expected(problem), []
    for layout in (ONE, combined("pipeline", "tensor")):
        program = one.problem.program(layout, one.seed)
        state = program.begin(one.parameters)
        found.append(jax.device_get(program.evaluate(state, program.place(one.batches[0]))))
    for name, sums in found[0].items():
        np.testing.assert_allclose(found[1][name], sums, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("problem", ["distilled", "DPO, adapters off"])
def test_without_a_flush_a_batch_in_flight_has_what_frozen_models_say_of_it(problem, expected):
    """At a rate of 0 a step's metrics are those of one device a step before."""
    still = AdamW(Constant(0.0), clip=None)
    one, found = expected(problem), []
    for layout in (ONE, combined("pipeline", schedule=TwoBW())):
        program = replace(one.problem, optimizer=still).program(layout, one.seed)
        found.append(train(program, program.begin(one.parameters), one.batches).metrics)
    assert_metrics_agree(found[1][1:], found[0][:-1])
