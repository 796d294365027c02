"""Several adapters trained at once: each becomes what a run that trains it alone makes of its own sequences."""

import math
import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax
import pytest

from axon.errors import UserError
from axon.layout import Execution, Layout, sequence_parallel
from axon.nn import Routing
from axon.nn.adapter_set import stored_factor
from axon.nn.lora import LoRA
from axon.parallel.outer import DiLoCo
from axon.parallel.pipeline import TwoBW, ZeroBubbleH1
from axon.runtime import flattened, nested
from axon.train.adapters_off import AdaptersOff
from axon.train.contrastive import InfoNCE
from axon.train.distillation import Distillation
from axon.train.kto import KTO
from axon.train.objective import NextToken
from axon.train.optimizers import EMA, Adafactor, AdamW, Constant, Linear, Optax
from axon.train.policy_gradient import GRPO
from axon.train.preference import DPO, ORPO
from axon.train.step import Program
from models.llama import Llama
from models.mixtral import Mixtral

NAMES = ("items", "eval")  # as modules and dictionaries have attributes
LLAMA = Llama(vocab=61, vocab_multiple=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
MIXTRAL = Mixtral(61, 16, 2, 4, 2, 24, Routing(4, 2), vocab_multiple=64)
LORA = LoRA(rank=3)
SEVERAL = replace(LORA, adapters=NAMES)
ADAMW = AdamW(Linear(3e-2, warmup=2, steps=8), eps=1e-4, clip=0.02)
BATCH, SEQ = 8, 16
WHOSE = (
    [0, 1, 0, 1, 1, 0, -1, 0],
    [0, 0, 0, 0, 0, -1, 0, 0],  # nothing of the second
    [1, 1, 0, 1, 1, 0, 1, 1],
)


@dataclass(frozen=True)
class Halved(NextToken):
    """Says its sums and not what they are made of."""

    def sums(self, module, batch, key=None):
        found = super().sums(module, batch, key)
        return replace(found, minimised={name: 0.5 * value for name, value in found.minimised.items()})


def program(lora, layout=Layout({"data": 1}), optimizer=ADAMW, model=LLAMA, **more):
    more = {"objective": NextToken(z_loss=0.1), "transforms": (lora,)} | more
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    made = Program(model, layout, optimizer, batch=BATCH, seq=SEQ, devices=devices, seed=3, **more)
    for name, runtime in made.references.runtimes.items():
        made.references.give(name, *runtime.initialise(4))
    return made


def batches_of(rng, packed_batch):
    return [packed_batch(rng, BATCH, SEQ, LLAMA.vocab) | {"adapters": np.array(own, np.int32)} for own in WHOSE]


def own_rows(batch, number):
    """The sequences of one adapter, and padding."""
    mine = batch["adapters"] == number
    rows = {name: value[mine] for name, value in batch.items() if name != "adapters"}
    return {name: np.pad(value, ((0, BATCH - mine.sum()), (0, 0))) for name, value in rows.items()}, mine.any()


def trained(made, batches, begun=None):
    state, metrics = (made.init() if begun is None else made.begin(begun)), []
    for batch in batches:
        state, found = made.step(state, made.place(batch))
        metrics.append({name: float(value) for name, value in found.items() if name != "norms"})
    return flattened(jax.device_get(state.parameters)), metrics


def assert_close(ours, expected, begun):
    """To what rounding does: of how far the parameter has moved."""
    for path, value in expected.items():
        moved = np.linalg.norm(value - begun[path])
        assert moved > 0, path
        assert np.linalg.norm(ours[path] - value) < 1e-4 * moved, path


def answers_of(rng, examples, sides, name="answers"):
    """Batches with two examples of two texts in a sequence, in some of which is one: `examples(rng)` says which of its
    `sides` texts an example has."""
    places = np.arange(SEQ) // (SEQ // 4)
    for own in WHOSE:
        single = rng.random((BATCH, 1)) < 0.3
        positions = np.tile(np.arange(SEQ, dtype=np.int32) % 4, (BATCH, 1))
        tokens, targets = rng.integers(0, LLAMA.vocab, (2, BATCH, SEQ), dtype=np.int32)
        texts = np.array([[[sides * n + side for side in examples(rng)] for n in range(2)] for _ in range(BATCH)])
        whose = texts.reshape(BATCH, 4)[:, places].astype(np.int32)
        whose = np.where(single & (whose >= sides), -1, whose)
        weights = ((positions > 0) & (whose >= 0) & (np.array(own) >= 0)[:, None]).astype(np.float32)
        text = {"tokens": tokens, "targets": targets, "positions": positions, name: whose, "weights": weights}
        yield text | {"adapters": np.array(own, np.int32)}


def pairs_of(rng):
    return answers_of(rng, lambda rng: (0, 1), 2)


def labelled_of(rng):
    """Answers that are desirable or not, each with another prompt's."""
    return answers_of(rng, lambda rng: (int(rng.integers(2)), 2), 3)


def texts_of(rng):
    """Queries with the text that belongs to each."""
    return answers_of(rng, lambda rng: (0, 1), 3, "texts")


DATA = {"dpo": pairs_of, "orpo": pairs_of, "kto": labelled_of, "contrastive": texts_of}

PROBLEMS = {
    "adamw": (LORA, {"optimizer": ADAMW}),
    "adafactor": (LORA, {"optimizer": Adafactor(Constant(1e-2), clip=0.02)}),
    "dpo": (LORA, {"objective": DPO(), "references": {"reference": AdaptersOff()}}),
    "orpo": (LORA, {"objective": ORPO()}),
    "kto": (LORA, {"objective": KTO(examples=2), "references": {"reference": AdaptersOff()}}),
    "contrastive": (LORA, {"objective": InfoNCE(examples=2), "layout": Layout({"data": 1}, microbatches=2)}),
    "distillation": (LORA, {"objective": Distillation(next_token=0.3), "references": {"teacher": LLAMA}}),
    "experts": (LORA, {"model": MIXTRAL}),
    "experts of some matrices": (replace(LORA, paths=("*/moe/up", "*/attention/*")), {"model": MIXTRAL}),
}


@pytest.mark.full
@pytest.mark.draws(2)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_adapter_becomes_what_it_is_alone(problem, rng, packed_batch):
    lora, fields = PROBLEMS[problem]
    batches = list(DATA[problem](rng)) if problem in DATA else batches_of(rng, packed_batch)
    together, metrics = trained(program(replace(lora, adapters=NAMES), **fields), batches)
    alone = program(lora, **fields)
    begun = flattened(jax.device_get(alone.init().parameters))
    for number, name in enumerate(NAMES):
        rows = [own_rows(batch, number) for batch in batches]
        expected, alone_metrics = trained(alone, [one for one, there in rows if there])
        factors = {path: value for path, value in expected.items() if path.endswith(("/a", "/b"))}
        assert_close({path: together[stored_factor(path, name)] for path in factors}, factors, begun)
        for metric in {"loss", "accuracy"} & alone_metrics[0].keys():
            found = [one[f"{metric}/{name}"] for one, (_, there) in zip(metrics, rows, strict=True) if there]
            np.testing.assert_allclose(found, [one[metric] for one in alone_metrics], rtol=1e-5)
        for path in expected.keys() - factors.keys():
            np.testing.assert_array_equal(together[path], begun[path], err_msg=path)


LAYOUTS = {
    "zero 1 tensor": Layout({"data": 2, "tensor": 2}, zero=1),
    "zero 2 microbatches": Layout({"data": 2}, zero=2, microbatches=2),
    "zero 3 sequence": Layout({"data": 2, "tensor": 2}, zero=3, rows=sequence_parallel()),
    "ring": Layout({"context": 2, "data": 2}, context="ring", microbatches=2),
    "auto": Layout({"data": 2, "tensor": 2}, zero=3, auto=True),
    "stages": Layout({"pipe": 2, "data": 2}, microbatches=4),
    "experts": Layout({"expert": 2, "data": 2}, zero=3),
    "experts in rounds": Layout({"expert": 2, "context": 2}, context="ring", microbatches=2),
    "experts on stages": Layout({"pipe": 2, "expert": 2}, microbatches=2),
    "stages tensor": Layout({"pipe": 2, "tensor": 2}, microbatches=2, schedule=ZeroBubbleH1()),
}


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_what_adapters_become(name, rng, packed_batch):
    """At a low rate: at a high one rounding grows from step to step."""
    slow = replace(ADAMW, schedule=Constant(1e-3))
    fields = {"optimizer": slow} | ({"model": MIXTRAL} if name.startswith("experts") else {})
    batches, one = batches_of(rng, packed_batch), program(SEVERAL, **fields)
    begun = {
        path: rng.normal(0, 0.1, x.shape).astype(x.dtype) if path.endswith("/b") else x
        for path, x in flattened(jax.device_get(one.init().parameters)).items()
    }
    expected, metrics = trained(one, batches, nested(begun))
    ours, own_metrics = trained(program(SEVERAL, LAYOUTS[name], **fields), batches, nested(begun))
    trained_paths = {path: value for path, value in expected.items() if "/adapters/" in path}
    assert_close(ours, trained_paths, begun)
    for mine, other in zip(own_metrics, metrics, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_allclose(mine[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"objective": GRPO()}, ("Train.objective is GRPO", "@NextToken()")),
        (
            {
                "model": replace(MIXTRAL, routing=Routing(4, 2, bias_rate=0.01)),
                "transforms": (SEVERAL,),
            },
            ("Routing.bias_rate", "LoRA.adapters = ()"),
        ),
        ({"objective": Halved()}, ("Halved", "leave `sums` to BySequence", "LoRA.adapters = ()")),
        ({"optimizer": EMA(ADAMW)}, ("LoRA.adapters", "averaged")),
        ({"optimizer": Optax(optax.sgd, Constant(1e-3))}, ("LoRA.adapters", "Optax")),
        ({"layout": Layout({"pipe": 2}, microbatches=4, schedule=TwoBW())}, ("LoRA.adapters", "TwoBW")),
        ({"outer": DiLoCo(2), "layout": Layout({"replica": 2})}, ("LoRA.adapters", "DiLoCo")),
        ({"execution": Execution(host=("optimizer",))}, ("LoRA.adapters", "Execution.host")),
        ({"transforms": (LORA, SEVERAL)}, ("Train.transforms has 2", "leave the others out")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)
def test_what_would_couple_adapters_is_refused_with_the_way_out(more, said):
    with pytest.raises(UserError) as error:
        program(SEVERAL, **more)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dora": True}, "LoRA.dora = True"),
        ({"init": "pissa"}, "LoRA.init = 'pissa'"),
        ({"others": "norm/*"}, "LoRA.others"),
        ({"adapters": ("a", "a")}, "LoRA.adapters has 'a'"),
        ({"adapters": ("a/b",)}, "LoRA.adapters has 'a/b'"),
    ],
)
def test_a_field_that_adapters_cannot_have_is_named(fields, said):
    with pytest.raises(UserError, match=re.escape(said)):
        LoRA(**{"adapters": NAMES} | fields)
