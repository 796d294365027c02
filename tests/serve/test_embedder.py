"""Embeddings: what pooling makes of a model's outputs, and that a text's does not depend on what else is asked."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from random_models import made
from test_engine import llama

from axon.errors import UserError
from axon.nn import Inputs
from axon.serve.embedder import Embedder, TextEncoder, is_encoder
from axon.serve.pooling import Pooling
from axon.serve.sentence_transformers import sentences_of
from models.bert import Bert

pytestmark = pytest.mark.usefixtures("caches")

VOCAB, MOST = 64, 70
BERT = Bert(VOCAB, 32, 1, 4, 48, positions=80)
MODELS = {"encoder": BERT, "decoder": llama(window=9)}


@pytest.fixture(scope="module", params=MODELS)
def model(request, shared_seed):
    return made(MODELS[request.param], shared_seed)


def drawn(rng, count):
    return [rng.integers(0, VOCAB, int(rng.integers(1, MOST + 1))).tolist() for _ in range(count)]


def embedded(embedder, texts):
    number, found = embedder.submit(texts), {}
    while embedder.busy:
        found |= embedder.step()
    return found[number]


def expected(runtime, values, variables, pooling, ids):
    """By the formula, of one text without padding."""

    def hidden(values):
        places = jnp.arange(len(ids), dtype=jnp.int32)[None]
        return runtime.bind(values, variables).hidden(Inputs(jnp.asarray([ids]), places, jnp.zeros_like(places)))[0]

    with runtime.tracing():
        x = np.asarray(runtime.jit(hidden)(values), np.float64)[0]
    found = {"mean": x.mean(axis=0), "cls": x[0], "last": x[-1]}[pooling.mode]
    return found / np.linalg.norm(found) if pooling.normalise else found


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("pooling", [Pooling("mean"), Pooling("cls", normalise=False), Pooling("last")], ids=str)
def test_an_embedding_is_the_pooled_output_of_a_texts_own_tokens(model, pooling, rng):
    embedder = Embedder([TextEncoder(*model, pooling, MOST)])
    texts = drawn(rng, 2)
    for ids, embedding in zip(texts, embedded(embedder, texts), strict=True):
        np.testing.assert_allclose(embedding, expected(*model, pooling, ids), atol=2e-5)
        assert embedding.shape == (embedder.width,)


@pytest.mark.few(model=("encoder",))
def test_in_a_crowd_an_embedding_has_the_bits_that_it_has_alone_and_nothing_is_compiled(model, rng):
    encoders = [TextEncoder(*model, Pooling("mean"), MOST) for _ in range(2)]
    embedder, texts = Embedder(encoders), drawn(rng, 9)
    embedder.warm_up()
    compiled = [encoder.compiles for encoder in encoders]
    assert compiled == [3, 3], "texts of 32, 64 and 70 tokens"
    alone = [embedded(embedder, [ids])[0] for ids in texts]
    order = rng.permutation(len(texts))
    crowd = embedded(embedder, [texts[place] for place in order])
    assert all(np.array_equal(crowd[k], alone[place]) for k, place in enumerate(order))
    assert [encoder.compiles for encoder in encoders] == compiled


@pytest.mark.full
@pytest.mark.draws(1)
def test_batches_of_several_texts_give_the_same_embeddings(model, monkeypatch, rng):
    """As accelerators have them; here in float32."""
    texts, one = drawn(rng, 9), Embedder([TextEncoder(*model, Pooling("mean"), MOST)])
    alone = embedded(one, texts)
    monkeypatch.setattr(TextEncoder, "batch", lambda self, length: 4)
    crowd = embedded(Embedder([TextEncoder(*model, Pooling("mean"), MOST)]), texts)
    np.testing.assert_allclose(crowd, alone, atol=2e-5)


@pytest.mark.few(model=("encoder",))
def test_texts_that_are_asked_for_at_once_come_back_to_those_who_asked(model, rng):
    embedder, asked = Embedder([TextEncoder(*model, Pooling("mean"), MOST)]), [drawn(rng, 3) for _ in range(4)]
    alone = [embedded(embedder, texts) for texts in asked]
    numbers, found = [embedder.submit(texts) for texts in asked], {}
    embedder.step()
    embedder.cancel(numbers[2])
    while embedder.busy:
        found |= embedder.step()
    assert [*sorted(found)] == [numbers[0], numbers[1], numbers[3]]
    for number, texts in found.items():
        assert np.array_equal(texts, alone[numbers.index(number)])


@pytest.mark.few(model=("encoder",))
@pytest.mark.parametrize("texts", [[], [[]], [[1], [1] * (MOST + 1)]], ids=["none", "empty", "too long"])
def test_what_cannot_be_embedded_is_refused(model, texts):
    embedder = Embedder([TextEncoder(*model, Pooling("mean"), MOST)])
    with pytest.raises(UserError, match="text"):
        embedder.submit(texts)
    assert not embedder.busy


def test_an_encoder_is_told_from_a_decoder():
    assert is_encoder(BERT.build())
    assert not is_encoder(llama().build())


@pytest.mark.parametrize(
    ("cuts", "dimensions", "said"),
    [
        ((), 3, "the model does not say that they may be cut"),
        ((2, 4), 3, "they may be cut to 2, 4"),
        (None, 9, "they may be cut to fewer"),
        ((2, 4), 4, None),
        (None, 3, None),
        ((), 8, None),
        ((), None, None),
    ],
)
def test_embeddings_are_cut_only_where_the_model_says_so(cuts, dimensions, said, rng):
    pooling = Pooling("mean", cuts=cuts)
    if said:
        with pytest.raises(UserError, match=f"dimensions is {dimensions}; embeddings have 8, and {said}"):
            pooling.check_cut(8, dimensions)
        return
    pooling.check_cut(8, dimensions)
    whole = rng.normal(size=8).astype(np.float32)
    whole /= np.linalg.norm(whole)
    cut = pooling.cut(whole, dimensions)
    assert cut.shape == (dimensions or 8,)
    np.testing.assert_allclose(cut * np.linalg.norm(whole[: len(cut)]), whole[: len(cut)], rtol=1e-6)


TYPES = "sentence_transformers.models."


def written(folder, kinds, pooling, config=None, **others):
    """A model's folder, as far as it says how texts are embedded."""
    modules = [
        {"idx": k, "name": str(k), "path": f"{k}_{kind}" if k else "", "type": f"{TYPES}{kind}"}
        for k, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(parents=True)
    files = {"modules": modules, "1_Pooling/config": pooling, "config": config or {}, **others}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


BOTH, ALL = ("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (ALL, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling("mean")),
        (BOTH, {"pooling_mode_cls_token": True}, Pooling("cls", normalise=False)),
        (ALL, {"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling("last")),
        (ALL, {"pooling_mode": "lasttoken"}, Pooling("last")),
        (ALL, {"pooling_mode": "mean"}, Pooling("mean")),
    ],
)
def test_pooling_is_what_sentence_transformers_files_say(tmp_path, kinds, pooling, expected):
    folder = written(tmp_path / "model", kinds, pooling, sentence_bert_config={"max_seq_length": 256})
    found = sentences_of(folder, Pooling("mean"))
    assert (found.pooling, found.length) == (expected, 256)
    assert sentences_of(None, expected).pooling == expected


@pytest.mark.parametrize(
    ("kinds", "pooling", "others", "said"),
    [
        ((*BOTH, "Dense"), {"pooling_mode_cls_token": True}, {}, "the modules are Transformer, Pooling, Dense"),
        (ALL, {"pooling_mode_max_tokens": True}, {}, "asks for pooling_mode_max_tokens; must be one of"),
        (ALL, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {}, "must be one of"),
        (ALL, {}, {}, "asks for no mode"),
        (ALL, {"pooling_mode": "mean"}, {"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case is true"),
        (ALL, {"pooling_mode": "mean"}, {"config_sentence_transformers": {"default_prompt_name": "query"}}, "'query'"),
    ],
)
def test_what_is_done_otherwise_is_refused(tmp_path, kinds, pooling, others, said):
    with pytest.raises(UserError, match=said):
        sentences_of(written(tmp_path / "model", kinds, pooling, **others), Pooling("mean"))


def test_a_config_says_to_what_embeddings_may_be_cut(tmp_path):
    for number, (config, cuts) in enumerate(
        [({"matryoshka_dimensions": [8, 16]}, (8, 16)), ({"is_matryoshka": True}, None)]
    ):
        folder = written(tmp_path / str(number), ALL, {"pooling_mode": "cls"}, config)
        assert sentences_of(folder, Pooling("mean")).pooling == Pooling("cls", cuts=cuts)
