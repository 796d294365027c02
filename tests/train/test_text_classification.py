"""Classification of texts: loss and gradient beside the formula, whatever the packing and the layout; what is read."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Auxiliary
from axon.run import Evaluation
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from axon.train.text_classification import TextClassification
from axon.tune import LabelledTexts, TextClassifier
from axon.tune.packing import Document, Example, batch_of
from models.bert import Bert

LABELS = ("sad", "merry", "neither")


def test_loss_and_gradient_are_those_of_the_formula(rng):
    weights, targets = (rng.random((3, 7)) < 0.3).astype(float), rng.integers(0, 4, (3, 7))
    weights[0, 0] = 1
    hidden, classifier = rng.normal(size=(3, 7, 5)), rng.normal(size=(5, 4))
    with jax.enable_x64(True):
        batch = {"weights": jnp.asarray(weights), "targets": jnp.asarray(targets)}
        batch |= {name: jnp.zeros((3, 7), jnp.int32) for name in ("tokens", "positions", "documents")}

        def loss(classifier):
            module = SimpleNamespace(hidden=lambda _: (jnp.asarray(hidden), None, Auxiliary()), classifier=classifier)
            objective = TextClassification()
            sums, counts = objective.sums(module, batch), objective.counts(batch)
            return sums.minimised["classification"] / counts["classification"], sums.metrics["accuracy"]

        (found, right), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(classifier))
    logits = (hidden @ classifier)[weights > 0]
    own, shares = targets[weights > 0], np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
    each = np.arange(len(own))
    np.testing.assert_allclose(found, -np.mean(np.log(shares[each, own])), rtol=1e-9)
    assert float(right) == np.sum(np.argmax(logits, axis=1) == own)
    shares[each, own] -= 1
    np.testing.assert_allclose(gradient, hidden[weights > 0].T @ shares / len(own), rtol=1e-9, atol=1e-12)


def examples_of(rng, count):
    lengths = rng.integers(3, 7, count)
    texts = [np.append(rng.integers(1, 300, length), rng.integers(len(LABELS))) for length in lengths]
    return [Example((Document(ids, np.arange(len(ids)) == len(ids) - 1),), "") for ids in texts]


@pytest.mark.full
@pytest.mark.draws(2)
@pytest.mark.parametrize("encodes", [False, True], ids=["the last token", "the first token"])
@pytest.mark.parametrize(
    ("layout", "devices", "each"),
    [
        (Layout({"data": 1}, microbatches=2), 1, 2),
        (Layout({"data": 2, "tensor": 2}, zero=3), 4, 2),
        (Layout({"context": 2}), 2, 1),
    ],
    ids=["packed, in microbatches", "packed, on a layout", "context"],
)
def test_a_step_is_that_of_the_global_batch(layout, devices, each, encodes, tiny, few, random_parameters, seed):
    found, read = [], Bert(tiny.model.vocab, 32, 1, 4, 64, positions=32, dropout=0.0) if encodes else tiny.model
    for one_layout, count, packed in ((Layout({"data": 1}), 1, 1), (layout, devices, each)):
        rng = np.random.default_rng(seed)
        examples = examples_of(rng, 8)
        rows = [examples[start : start + packed] for start in range(0, 8, packed)]
        batch = batch_of([*rows, *[[] for _ in range(8 - len(rows))]], 32, "documents")
        with few(count):
            model, objective = TextClassifier(read, LABELS), TextClassification()
            one = Program(model, one_layout, tiny.optimizer, batch=8, seq=32, objective=objective)
        state = one.init(jax.tree.map(jnp.asarray, random_parameters(one.runtime.module, rng)))
        found.append(jax.device_get(one.step(state, one.place(batch))[1]))
    for name in ("loss", "grad_norm", "accuracy", "tokens"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_encoder_is_told_the_types_of_a_pairs_tokens(rng, bind, random_parameters):
    module = TextClassifier(Bert(301, 32, 1, 4, 64, positions=32, dropout=0.0), LABELS).build()
    module = bind(module, random_parameters(module, rng))
    examples = examples_of(rng, 5)
    typed = [np.sort(rng.integers(0, 2, len(one.documents[0].ids) - 1)).astype(np.int32) for one in examples]
    with_types = [
        replace(one, documents=(replace(one.documents[0], more={"types": np.append(0, types)}),))
        for one, types in zip(examples, typed, strict=True)
    ]
    more, objective = {"types": np.zeros((), np.int32)}, TextClassification()
    batch = batch_of([with_types[:3], with_types[3:]], 32, "documents", more)
    found = objective.sums(module, objective.draw(module, batch, jax.random.key(0))).minimised["classification"]
    expected = 0.0
    for one, types in zip(examples, typed, strict=True):
        *ids, label = one.documents[0].ids.tolist()
        inputs = NextToken().inputs(batch_of([[one]], len(ids), "documents"))
        pooled = module.pooled(module.hidden(inputs, jnp.asarray(types)[None])[0], inputs)[0, 0]
        logits = pooled @ module.classifier.get_value() + module.classifier_bias.get_value()
        expected -= jax.nn.log_softmax(logits)[label]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    untyped = objective.draw(module, {**batch, "types": jnp.zeros_like(batch["types"])}, jax.random.key(0))
    assert abs(objective.sums(module, untyped).minimised["classification"] - expected) > 1e-3


def texts(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {"seq": 32, "batch": 8, "tokenizer": Bpe(vocab=257), "held_out": 0.0, "threads": 0, "labels": LABELS}
    return LabelledTexts(**{**defaults, "sources": (JsonLines(str(path)),), **fields})


def silent(line):
    pass


def test_the_class_is_the_target_of_the_end_and_nothing_else_is_learned(tmp_path, caches):
    records = [{"text": "ab", "label": "merry"}, {"text": "c", "label": 0}, {"text": "d", "label": "neither"}]
    lines = []
    prepared = texts(tmp_path / "x.jsonl", records).prepare(lines.append)
    batch = prepared.splits["train"].batch(np.arange(1))
    found = {}
    for number in range(3):
        own = batch["documents"][0] == number
        (place,) = np.flatnonzero(own & (batch["weights"][0] > 0))
        found[prepared.tokenizer.decode(batch["tokens"][0][own])] = int(batch["targets"][0][place])
        assert place == np.flatnonzero(own)[-1]
    end = "<|endoftext|>"
    assert found == {f"{end}ab{end}": 1, f"{end}c{end}": 0, f"{end}d{end}": 2}
    assert "labels: sad 1, merry 1, neither 1" in lines
    assert prepared.data.title(prepared.splits["train"].examples[0]).endswith("x.jsonl:1: merry")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"text": "a", "label": "mery"}], ("x.jsonl:1", "'mery'", "LabelledTexts.labels", "Did you mean 'merry'?")),
        ([{"text": "a", "label": 3}], ("x.jsonl:1", "label is 3")),
        ([{"text": "a", "label": [1]}], ("x.jsonl:1", "'label'", "name of a class")),
        ([{"text": name, "label": "sad"} for name in "abc"], ("all 3", "'sad'", "add texts")),
        ([{"text": "a", "text_pair": "b", "label": 0}], ("x.jsonl:1", "TokenizerFile.prompts = 'template'")),
    ],
)
def test_labels_that_teach_nothing_are_refused(records, said, tmp_path, caches):
    with pytest.raises(UserError) as error:
        texts(tmp_path / "x.jsonl", records).prepare(silent)
    for part in said:
        assert part in str(error.value)


def test_data_objective_and_model_are_of_one_kind(tiny, few, tmp_path, caches):
    records = [{"text": name, "label": number} for number, name in enumerate("abc")]
    prepared = texts(tmp_path / "x.jsonl", records).prepare(silent)
    with pytest.raises(UserError, match=r"LabelledTexts.*NextToken.*@TextClassification\(\)"):
        prepared.check_fits(tiny.model, NextToken(), 32)
    with pytest.raises(UserError, match=r"LabelledTexts\.labels is .*TextClassifier\.labels .*same"):
        prepared.check_fits(TextClassifier(tiny.model, ("a", "b")), TextClassification(), 32)
    with pytest.raises(UserError, match=r"TextClassifier\.labels is \('a',\); expected two"):
        TextClassifier(tiny.model, ("a",))
    with few(1), pytest.raises(UserError, match=r"without `classifier`.*@TextClassifier\(\)"):
        Program(tiny.model, Layout({"data": 1}), tiny.optimizer, batch=8, seq=32, objective=TextClassification())


@pytest.mark.full
def test_a_model_learns_which_texts_have_a_letter(tiny, do, tmp_path, rng):
    names = ["".join(rng.choice([*"abcdefgh"], size=6)) for _ in range(400)]
    records = [{"text": name, "label": "merry" if "a" in name else "sad"} for name in names]
    data = texts(tmp_path / "x.jsonl", records, held_out=0.2, batch=16, labels=LABELS[:2])
    model, optimizer = TextClassifier(tiny.model, LABELS[:2]), AdamW(Constant(peak=1e-2, warmup=5))
    run = replace(tiny, model=model, data=data, objective=TextClassification(), optimizer=optimizer, steps=60)
    do(replace(run, evaluation=Evaluation(every=60)), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["eval_accuracy"] > 0.9
