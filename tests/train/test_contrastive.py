"""InfoNCE: loss and gradient beside the paper's formula, over the global batch whatever the microbatches and layout."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.layout import Layout
from axon.train.contrastive import InfoNCE
from axon.train.step import Program
from axon.tune import TextPairs
from axon.tune.packing import EMPTY, Document, Example, batch_of


def formula(temperature, queries, positives, negatives):
    texts = jnp.concatenate([positives, negatives])
    scores = queries @ texts.T / temperature
    own = jnp.sum(queries * positives, axis=1) / temperature
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(scores), axis=1)) - own)


@pytest.mark.full
@pytest.mark.draws(1)
def test_loss_and_gradient_are_those_of_the_paper(rng):
    objective = InfoNCE(examples=3, temperature=0.5)
    real, negative = rng.random((4, 3)) < 0.7, rng.random((4, 3)) < 0.5
    real[0, 0] = True
    embeddings = rng.normal(size=(4, 3, 3, 5))
    there = np.stack([real, real, real & negative], axis=-1).reshape(4, 9)
    batch = {
        "texts": jnp.asarray(np.where(there, np.arange(9), -1)),
        "weights": jnp.asarray(there, jnp.float32),
    }
    with jax.enable_x64(True):

        def loss(x):
            sums, counts = objective.coupled({"embeddings": x}, batch), objective.counts(batch)
            return sums.minimised["contrastive"] / counts["contrastive"]

        def expected(x):
            own = x[real]
            return formula(0.5, own[:, 0], own[:, 1], x[real & negative][:, 2])

        found, gradient = jax.value_and_grad(loss)(jnp.asarray(embeddings))
        value, right = jax.value_and_grad(expected)(jnp.asarray(embeddings))
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(gradient, right, rtol=1e-6, atol=1e-9)


def examples_of(rng, count):
    def document():
        ids = rng.integers(1, 300, rng.integers(3, 5))
        return Document(ids, np.ones(len(ids), bool))

    return [Example((document(), document(), document() if rng.random() < 0.5 else EMPTY), "") for _ in range(count)]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("layout", "devices", "each", "pooling"),
    [
        (Layout({"data": 1}), 1, 2, "last"),
        (Layout({"data": 1}, microbatches=4), 1, 1, "mean"),
        (Layout({"data": 2, "tensor": 2}, zero=3, microbatches=2), 4, 2, "last"),
    ],
    ids=["packed", "microbatches", "microbatches on a layout"],
)
def test_a_step_is_that_of_the_global_batch(layout, devices, each, pooling, tiny, few, random_parameters, seed):
    found = []
    for one_layout, count, packed in ((Layout({"data": 1}), 1, 1), (layout, devices, each)):
        rng = np.random.default_rng(seed)
        examples = examples_of(rng, 8)
        rows = [examples[start : start + packed] for start in range(0, 8, packed)]
        batch = batch_of([*rows, *[[] for _ in range(8 - len(rows))]], 32, "texts")
        with few(count):
            objective = InfoNCE(pooling=pooling)
            one = Program(tiny.model, one_layout, tiny.optimizer, batch=8, seq=32, objective=objective)
        state = one.init(jax.tree.map(jnp.asarray, random_parameters(one.runtime.module, rng)))
        found.append(jax.device_get(one.step(state, one.place(batch))[1]))
    first, other = found
    assert np.all(np.isfinite(first["norms"])), first["norms"]
    for name in ("loss", "grad_norm", "accuracy", "positive", "tokens"):
        np.testing.assert_allclose(other[name], first[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(other["norms"], first["norms"], rtol=1e-3, atol=1e-7)


def pairs(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return TextPairs(128, 2, (JsonLines(str(path)),), Bpe(vocab=257), **{"held_out": 0.0, "threads": 0, **fields})


def silent(line):
    pass


def test_texts_are_written_as_they_are_and_end(tmp_path, caches):
    records = [{"query": "ab", "positive": "cd", "negative": "e"}, {"query": "f", "positive": "gh"}]
    prepared = pairs(tmp_path / "x.jsonl", records).prepare(silent)
    batch = prepared.splits["train"].batch(np.arange(1))
    assert batch.keys() == prepared.arrays.keys() == InfoNCE().specs(1, 128).keys()
    found = {}
    for number in range(6):
        own = batch["texts"][0] == number
        found[number] = prepared.tokenizer.decode(batch["tokens"][0][own])
        assert np.all(batch["weights"][0][own] == 1)
    end = "<|endoftext|>"
    assert found == dict(enumerate([*(f"{end}{text}{end}" for text in ("ab", "cd", "e", "f", "gh")), ""]))
    assert prepared.questions(3) == []


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"query": "a", "positive": "a"}, ("x.jsonl:1", "'positive'", "'query'")),
        ({"query": "a", "positive": "b", "negative": "b"}, ("x.jsonl:1", "'positive'", "'negative'")),
        ({"query": "a", "positive": ["b"]}, ("x.jsonl:1", "'positive'", "a text")),
        ({"anchor": "a", "positive": "b"}, ("x.jsonl:1", "'anchor'", "query and positive", "columns")),
    ],
)
def test_texts_that_teach_nothing_are_refused(record, said, tmp_path, caches):
    with pytest.raises(UserError) as error:
        pairs(tmp_path / "x.jsonl", [record]).prepare(silent)
    for part in said:
        assert part in str(error.value)
