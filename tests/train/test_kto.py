"""KTO: its loss and gradient beside the paper's formula, over the global batch whatever the microbatches and layout."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import expit

from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.layout import Layout
from axon.nn.lora import LoRA
from axon.train.adapters_off import AdaptersOff
from axon.train.kto import KTO
from axon.train.preference import DPO
from axon.train.step import Program
from axon.tune import Comparisons, Labelled
from axon.tune.packing import EMPTY, Document, Example, batch_of


def formula(objective, ratio, desirable):
    """Equation 8 and its estimate of the divergence, of `ratio[example side]`, in numpy or jax; the mean."""
    own = jnp.where(desirable, ratio[:, 0], ratio[:, 1])
    z = jax.lax.stop_gradient(jnp.maximum(jnp.mean(ratio[:, 2]), 0))
    value = jnp.where(
        desirable,
        objective.desirable * expit(objective.beta * (own - z)),
        objective.undesirable * expit(objective.beta * (z - own)),
    )
    return jnp.mean(jnp.where(desirable, objective.desirable, objective.undesirable) - value)


@pytest.mark.parametrize("shift", [-3.0, 3.0], ids=["divergence below 0", "divergence"])
def test_loss_and_gradient_are_those_of_the_paper(shift, rng):
    objective, rows, room = KTO(examples=3, beta=0.3, desirable=1.4, undesirable=0.8), 4, 3
    desirable, real = rng.random((rows, room)) < 0.5, rng.random((rows, room)) < 0.8
    ratio = rng.normal(shift, 2, (rows, room, 3))
    answers = np.full((rows, 9), -1)
    for row, example in np.argwhere(real):
        places = 3 * example + np.arange(3)
        answers[row, places] = places
        answers[row, 3 * example + desirable[row, example]] = -1  # the side that it lacks
    batch = {"answers": jnp.asarray(answers), "weights": jnp.asarray(answers >= 0, jnp.float32)}
    with jax.enable_x64(True):

        def loss(ratio):
            sums, counts = objective.coupled({"ratio": ratio}, batch), objective.counts(batch)
            return sums.minimised["kto"] / counts["kto"]

        found, gradient = jax.value_and_grad(loss)(jnp.asarray(ratio))
        expected, own = jax.value_and_grad(lambda x: formula(objective, x, desirable[real]))(jnp.asarray(ratio[real]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient[real], own, rtol=1e-6, atol=1e-9)
    assert not np.any(gradient[~real])


def examples_of(rng, count, vocab=300):
    def document(prompt):
        ids = np.concatenate([prompt, rng.integers(1, vocab, rng.integers(2, 4))])
        return Document(ids, np.arange(len(ids)) >= len(prompt))

    found = []
    for _ in range(count):
        prompt = rng.integers(1, vocab, rng.integers(1, 4))
        own, other = document(prompt), document(prompt)
        found.append(Example((own, EMPTY, other) if rng.random() < 0.5 else (EMPTY, own, other), ""))
    return found


def rows_of(examples, each):
    packed = [examples[start : start + each] for start in range(0, len(examples), each)]
    return batch_of([*packed, *[[] for _ in range(8 - len(packed))]], 32, "answers")


def made(tiny, few, devices=1, layout=None, references=None, **fields):
    with few(devices):
        return Program(
            tiny.model,
            layout or tiny.layout,
            tiny.optimizer,
            batch=8,
            seq=32,
            objective=KTO(beta=0.3, desirable=1.2),
            references=references or {"reference": tiny.model},
            **fields,
        )


def stepped(one, rng, random_parameters, batch):
    """Metrics of a step of drawn parameters beside drawn others."""
    own = random_parameters(one.runtime.module, rng)
    for name, runtime in one.references.runtimes.items():
        shardings = jax.tree.map(lambda x: x.sharding, runtime.abstract(one.references.specs[name]["parameters"]))
        one.references.give(name, jax.device_put(random_parameters(runtime.module, rng), shardings))
    return jax.device_get(one.step(one.init(jax.tree.map(jnp.asarray, own)), one.place(batch))[1])


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("layout", "devices", "each"),
    [
        (Layout({"data": 1}), 1, 2),
        (Layout({"data": 1}, microbatches=4), 1, 1),
        (Layout({"data": 2, "tensor": 2}, zero=3, microbatches=2), 4, 2),
    ],
    ids=["packed", "microbatches", "microbatches on a layout"],
)
def test_a_step_is_that_of_the_global_batch(layout, devices, each, tiny, few, random_parameters, seed):
    found = []
    for one_layout, count, packed in ((Layout({"data": 1}), 1, 1), (layout, devices, each)):
        rng = np.random.default_rng(seed)
        batch = rows_of(examples_of(rng, 8), packed)
        found.append(stepped(made(tiny, few, count, one_layout), rng, random_parameters, batch))
    first, other = found
    for name in ("loss", "grad_norm", "accuracy", "kl", "chosen", "rejected", "tokens"):
        np.testing.assert_allclose(other[name], first[name], rtol=2e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(other["norms"], first["norms"], rtol=1e-3, atol=1e-8)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_policy_that_is_the_reference_has_no_divergence_and_adapters_learn_from_single_answers(tiny, few, rng):
    fields = {"transforms": (LoRA(rank=4),), "references": {"reference": AdaptersOff()}}
    one = made(tiny, few, layout=Layout({"data": 1}, microbatches=2), **fields)
    examples, losses = examples_of(rng, 8), []
    state, batch = one.init(), rows_of(examples, 1)
    for _ in range(4):
        state, metrics = one.step(state, one.place(batch))
        losses.append(float(metrics["loss"]))
    weights = [one.evaluator.objective.desirable if each.documents[1] is EMPTY else 1.0 for each in examples]
    assert losses[0] == pytest.approx(np.mean(weights) / 2, rel=1e-6)
    assert losses[-1] < losses[0]


def labelled(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {"seq": 128, "batch": 2, "tokenizer": Bpe(vocab=257), "held_out": 0.0, "threads": 0}
    return Labelled(**{**defaults, "sources": (JsonLines(str(path)),), **fields})


def silent(line):
    pass


def test_beside_an_answer_is_one_to_another_prompt(tmp_path, rng, caches):
    prompts = ["aa", "aa", "bb", "cc"]
    records = [{"prompt": p, "completion": f"{p}{n}", "label": n % 2 == 0} for n, p in enumerate(prompts)]
    prepared = labelled(tmp_path / "x.jsonl", records).prepare(silent)
    batch = prepared.splits["train"].batch(np.arange(len(prepared.splits["train"])))
    assert batch.keys() == prepared.arrays.keys() == KTO().specs(2, 128).keys()
    found = []
    for example in prepared.splits["train"].examples:
        sides = [prepared.tokenizer.decode(one.ids[one.learned]).strip() for one in example.documents]
        found.append([side.replace("<|endoftext|>", "").strip() for side in sides])
    assert found == [["aa0", "", "bb2"], ["", "aa1", "bb2"], ["bb2", "", "cc3"], ["", "cc3", "aa0"]]


def test_beside_an_answer_is_one_that_trains_the_same_adapter(tmp_path, caches):
    sources, names = [], ("one", "other", "one")
    for source, name in enumerate(names):
        path = tmp_path / f"{source}.jsonl"
        records = ({"prompt": f"p{n}", "completion": f"{name}{source}{n}", "label": n == 0} for n in range(2))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        sources.append(JsonLines(str(path)))
    fields = {"sources": tuple(sources), "adapters": names}
    prepared = labelled(tmp_path / "x.jsonl", [], **fields).prepare(silent)
    other = [example.documents[2] for example in prepared.splits["train"].examples]
    found = [prepared.tokenizer.decode(one.ids[one.learned]).replace("<|endoftext|>", "").strip() for one in other]
    assert found == ["one01", "one20", "other11", "other10", "one21", "one00"]
    Path(sources[1].path).write_text(json.dumps({"prompt": "p", "completion": "x", "label": True}))
    with pytest.raises(UserError, match="of adapter 'other' is True"):
        labelled(tmp_path / "x.jsonl", [], **fields).prepare(silent)


def test_an_answer_is_there_already_whatever_the_other_prompts_answer_beside_it(tmp_path, caches):
    one, other = ({"prompt": name, "completion": "x", "label": name == "a"} for name in "ab")
    records = [one, other, one, {**other, "completion": "y"}]
    kept = labelled(tmp_path / "x.jsonl", records, duplicates="drop").prepare(silent).splits["train"].examples
    assert [example.where.rpartition(":")[2] for example in kept] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"prompt": p, "completion": "x", "label": True} for p in "ab"], ("label", "Chats()")),
        ([{"prompt": "a", "completion": "x", "label": label} for label in (True, False)], ("same prompt",)),
        ([{"prompt": "a", "completion": "x", "label": "good"}], ("x.jsonl:1", "'label'", "true")),
        ([{"prompt": "a", "completion": "x"}], ("x.jsonl:1", "prompt and completion and label", "columns")),
        ([{"messages": [{"role": "user", "content": "a"}], "label": 1}], ("x.jsonl:1", "'messages'", "answer")),
    ],
)
def test_labels_that_teach_nothing_are_refused(records, said, tmp_path, caches):
    with pytest.raises(UserError) as error:
        labelled(tmp_path / "x.jsonl", records).prepare(silent)
    for part in said:
        assert part in str(error.value)


def test_pairs_and_single_answers_are_told_apart(tmp_path):
    fields = {"seq": 128, "batch": 2, "tokenizer": Bpe(vocab=257), "sources": (JsonLines(str(tmp_path / "x")),)}
    for data, objective, said in (
        (Labelled(**fields), DPO(), "Comparisons()"),
        (Comparisons(**fields), KTO(), "Labelled()"),
    ):
        with pytest.raises(UserError) as error:
            data.check_objective(objective)
        assert said in str(error.value)
