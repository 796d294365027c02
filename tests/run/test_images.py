"""A run on images: it trains, goes on, is evaluated and converted; and data, objective and model that do not fit."""

from dataclasses import replace
from typing import Any

import pytest

from axon.data import Data, Images, Letters, Prepared
from axon.errors import UserError
from axon.layout import Layout
from axon.observe.metrics import read_metrics
from axon.run import Train
from axon.run.convert import convert
from axon.run.inspect import evaluate_run, generate_text
from axon.serve.request import Sampling
from axon.train.classification import Classification
from axon.train.masked import MaskedToken
from axon.train.spans import SpanCorruption
from models.bert import Bert
from models.t5 import T5
from models.vit import ViT


@pytest.fixture(scope="module")
def pictures(tiny):
    """A run of 4 steps on letters."""
    return replace(
        tiny,
        model=ViT(image=8, patch=4, channels=1, embed=16, layers=1, heads=2, mlp=16, classes=26),
        data=Images(batch=8, source=Letters(size=8, count=60), held_out=0.2),
        objective=Classification(8, 8, 1),
        layout=Layout(),
        steps=4,
    )


@pytest.mark.full
def test_a_run_trains_goes_on_and_is_evaluated_and_converted(pictures, do, few, tmp_path):
    do(pictures, tmp_path / "run", steps=2)
    ran = do(pictures, tmp_path / "run")
    assert "resumed from step 2" in ran.lines
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"loss", "accuracy"} <= records[0].keys()
    with few(1):
        found = evaluate_run(tmp_path / "run", None, pictures.evaluation.batches, lambda line: None)
        assert records[-1]["eval_loss"] == pytest.approx(found.loss, rel=1e-5)
        assert f"nats per image, accuracy {found.others['accuracy']:.4f}" in str(found)
        convert(str(tmp_path / "run"), f"hf:{tmp_path / 'theirs'}", lambda line: None)
        convert(f"hf:{tmp_path / 'theirs'}", str(tmp_path / "back"), lambda line: None)
        with pytest.raises(UserError, match="is a model of images: it has no tokenizer"):
            generate_text(tmp_path / "back", "A", Sampling(), lambda line: None)
    ours = (tmp_path / "theirs" / "model.safetensors").read_bytes()
    with few(1):
        convert(str(tmp_path / "back"), f"hf:{tmp_path / 'again'}", lambda line: None)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == ours


class Only:
    """Prepared data that offers what `Prepared` says, and nothing else."""

    def __init__(self, whole: Prepared):
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        assert name in vars(Prepared), f"a run asks for {name}"
        return getattr(self._whole, name)


@pytest.mark.full
@pytest.mark.few(kind=("images",))
@pytest.mark.parametrize("kind", ["images", "text"])
def test_a_run_asks_its_data_for_what_images_and_text_both_offer(kind, pictures, tiny, do, tmp_path, monkeypatch):
    train = pictures if kind == "images" else tiny
    prepare = type(train.data).prepare
    monkeypatch.setattr(type(train.data), "prepare", lambda *arguments: Only(prepare(*arguments)))
    do(train, tmp_path / "run", steps=1)
    assert "eval_loss" in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]


def check_fits(train: Train, data: Prepared) -> None:
    data.check_fits(train.model, train.objective, train.seq)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": 16}, r"letters: images are of height, width and channels \(8, 8, 1\)"),
        ({"classes": 20}, "the largest label is 25, and the model has 20 classes"),
    ],
)
def test_images_that_are_not_the_models_are_refused(fields, message, pictures):
    train = replace(pictures, model=replace(pictures.model, **fields))
    with pytest.raises(UserError, match=message):
        check_fits(train, train.data.prepare(lambda line: None))


def test_images_for_a_model_of_text_are_refused(pictures, tiny):
    with pytest.raises(UserError, match="a Llama is no model of images"):
        _ = replace(pictures, model=tiny.model).seq


def test_an_evaluation_of_no_images_names_their_field(pictures):
    with pytest.raises(UserError, match=r"Train.evaluation needs Images\.held_out above 0"):
        replace(pictures, data=replace(pictures.data, held_out=0.0))


@pytest.mark.parametrize(("model", "objective", "own"), [(Bert, MaskedToken(), 1), (T5, SpanCorruption(), 3)])
def test_a_vocabulary_has_room_for_the_objectives_own_ids(model, objective, own, tiny, corpus):
    ids = corpus.tokenizer.vocab
    check_fits(replace(tiny, model=model(vocab=ids + own), objective=objective), corpus)
    message = f"{type(objective).__name__} needs the last {own} .*Set {model.__name__}.vocab to at least {ids + own}"
    with pytest.raises(UserError, match=message):
        check_fits(replace(tiny, model=model(vocab=ids + own - 1), objective=objective), corpus)


def test_a_mask_is_an_id_of_the_vocabulary_and_a_model_of_images_has_none(tiny, corpus):
    train = replace(tiny, model=Bert(vocab=400), objective=MaskedToken(mask_id=400))
    with pytest.raises(UserError, match="mask_id is 400, and the model's vocab 400"):
        check_fits(train, corpus)
    with pytest.raises(UserError, match="a ViT has no vocab"):
        check_fits(replace(tiny, model=ViT()), corpus)


@pytest.fixture(scope="module")
def corpus(tiny):
    assert isinstance(tiny.data, Data)
    return tiny.data.prepare(lambda line: None)
