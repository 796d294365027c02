"""Classifiers and reward models to the hub and back: the same weights, the same results, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from reports import silent
from safetensors.numpy import load_file, save_file
from tokenizers import Regex
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.checkpoint.huggingface.tokenizer import SETTINGS
from axon.checkpoint.huggingface.weights import SINGLE
from axon.data import JsonLines, TokenizerFile
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.run import Hub, HubTokenizer, InitFrom
from axon.run.convert import convert
from axon.run.export import export_model
from axon.run.inspect import evaluate_run, generate_text, logits_of
from axon.run.tasks import task_positions
from axon.run.trained import open_trained
from axon.serve.request import Sampling
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.preference import Reward
from axon.train.text_classification import TextClassification
from axon.tune import Comparisons, LabelledTexts, RewardModel, TextClassifier
from models.bert import Bert
from models.t5 import T5

LABELS = ("bad", "good", "fair")


@pytest.fixture(scope="module")
def records(tmp_path_factory, shared_seed):
    """Files of texts with their class, and of pairs."""
    rng, folder = np.random.default_rng(shared_seed), tmp_path_factory.mktemp("records")
    words = ["".join(rng.choice([*"abcdefgh"], 5)) for _ in range(120)]
    texts = [{"text": word, "label": LABELS[word < "c" or 2 * (word > "e")]} for word in words]
    pairs = [{"prompt": one, "chosen": one, "rejected": one[::-1] + "x"} for one in words]
    for name, lines in {"texts": texts, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def of(kind, trained, records):
    """A run of a classifier, or of a reward model, whose family has a head of its own that is not tied."""
    tokenizer = TokenizerFile(str(trained.folder / "tokenizer.json"))
    shape = {"seq": 64, "batch": 4, "tokenizer": tokenizer, "held_out": 0.2}
    model = replace(trained.train.model, tied=False, kv_heads=2)
    if kind == "texts":
        data = LabelledTexts(**shape, sources=(JsonLines(str(records / "texts.jsonl")),), labels=LABELS, end=False)
        return replace(trained.train, model=TextClassifier(model, LABELS), data=data, objective=TextClassification())
    data = Comparisons(**shape, sources=(JsonLines(str(records / "pairs.jsonl")),))
    return replace(trained.train, model=RewardModel(model), data=data, objective=Reward())


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_it_goes_to_the_hub_and_comes_back_the_same(kind, trained, records, do, few, tmp_path):
    ran = do(replace(of(kind, trained, records), steps=3, sample=None, evaluation=None), tmp_path / "run")
    theirs, back, source = f"hf:{tmp_path / 'hub'}", tmp_path / "back", str(records / f"{kind}.jsonl")
    with few(1):
        convert(str(ran.folder), theirs, silent)
        convert(theirs, str(back), silent)
        found = [evaluate_run(one, source, None, silent) for one in (str(ran.folder), theirs, str(back))]
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    names = LABELS if kind == "texts" else ("LABEL_0",)
    assert config["id2label"] == {str(at): name for at, name in enumerate(names)}
    assert Hub(theirs) == ran.train.model
    for other in found[1:]:
        assert other.metrics() == pytest.approx(found[0].metrics(), rel=1e-5)
    if kind == "texts":
        refused_by_name(tmp_path / "hub", tmp_path)
    for source in (str(ran.folder), theirs):
        refused_as_a_language_model(source, "classifier" if kind == "texts" else "score", tmp_path, few)


def refused_as_a_language_model(source, part, folder, few):
    """What asks for tokens says which part the model has in the place of a head for them, and what to name instead."""
    out, message = folder / "exported", rf"Train\.model of a run\) has {part} in the place of a head.*Name the run"
    with few(1):
        with pytest.raises(UserError, match=message):
            export_model(source, out, ["cpu"], 1, None, silent)
        with pytest.raises(UserError, match=message):
            logits_of(source, [[1, 2]], silent)
        with pytest.raises(UserError, match=message):
            generate_text(source, "alpha", Sampling(2), silent)
        with pytest.raises(UserError, match=message):
            task_positions(open_trained(source), source, None)
    assert not out.exists()


@pytest.mark.parametrize(("kind", "part"), [("texts", "classifier"), ("pairs", "score")])
def test_the_next_token_is_not_trained_where_a_model_has_another_part_in_the_place_of_its_head(
    kind, part, trained, records, do, tmp_path
):
    train = replace(of(kind, trained, records), data=trained.train.data, objective=NextToken())
    message = rf"NextToken predicts tokens, and the model has {part} in the place of its head: set Train\.objective"
    with pytest.raises(UserError, match=message):
        do(train, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_head_in_the_place_of_a_language_models_is_begun_anew_and_said_to_be_frozen(trained, records, do, tmp_path):
    short = {"steps": 1, "sample": None, "evaluation": None}
    model = replace(trained.train.model, tied=False)
    ran = do(replace(trained.train, model=model, **short), tmp_path / "base")
    start = InitFrom(str(ran.folder), ("*", "!score"))
    scored = replace(of("pairs", trained, records), model=RewardModel(model), init_from=start, **short)
    scored = replace(scored, transforms=(LoRA(rank=2),))
    lines = do(scored, tmp_path / "scored").lines
    assert "not taken: head, in whose place this model has its score" in lines
    (said,) = [line for line in lines if line.startswith("frozen")]
    assert "initial values: score. " in said
    assert "LoRA.others" in said


def refused_by_name(hub, tmp_path):
    def refused(message, **fields):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(hub, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(UserError, match=message):
            convert(f"hf:{other}", str(tmp_path / "new"), silent)

    refused('problem_type is "multi_label_classification"; must be', problem_type="multi_label_classification")
    refused('problem_type is "regression"; must be', problem_type="regression")
    refused(r"id2label is .*must be an object", id2label=["a", "b", "c"])
    refused(r"num_labels is \"3\"; must be", num_labels="3")
    refused(r"id2label is .*expected a name of each class", id2label={"1": "a", "2": "b", "3": "c"})
    refused(r"score.weight: shape \(3, 32\), the model's is \(4, 32\)", num_labels=4)
    refused(r"architectures.*NoneForSequence.*Axon has no model", architectures=["NoneForSequenceClassification"])


@pytest.fixture
def bert(tmp_path, rng):
    """bert(head, pooler): a folder of a random encoder as the hub has it, its tokenizer with [CLS] and [SEP]."""

    def written(head, pooler):
        ids = {token: number for number, token in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefgh"))}
        inner = tokenizers.Tokenizer(WordLevel(ids, "[UNK]"))
        inner.pre_tokenizer = Split(Regex("."), "isolated")
        inner.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
        )
        inner.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
        folder = tmp_path / "plain"
        folder.mkdir()
        inner.save(str(folder / "tokenizer.json"))
        settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        model = Bert(len(ids), 32, 1, 4, 48, positions=64, dropout=0.0, head=head, pooler=pooler)
        table = table_for(model)
        (folder / "config.json").write_text(json.dumps(write_config(table, model)))
        shapes = pieces_of(table, model.build(), model.vocab).shapes
        save_file({n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}, folder / SINGLE)
        return folder

    return written


def classifier_of(folder, records, tiny, **fields):
    """A run that makes a classifier of the encoder in a folder."""
    name = f"hf:{folder}"
    data = LabelledTexts(
        *(64, 4, (JsonLines(str(records / "texts.jsonl")),), HubTokenizer(name)), held_out=0.2, labels=LABELS
    )
    start = InitFrom(name, ("*", "!classifier*", *fields.pop("others", ())))
    train = replace(tiny, model=TextClassifier(Hub(name), LABELS), data=data, objective=TextClassification())
    return replace(train, init_from=start, steps=2, evaluation=None, **fields)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("head", [True, False])
def test_an_encoder_becomes_a_classifier_with_the_pooler_that_it_has_and_goes_to_the_hub(
    head, bert, records, tiny, do, few, tmp_path
):
    folder = bert(head, True)
    train = classifier_of(folder, records, tiny, optimizer=AdamW(Constant(1e-6)))
    ran = do(train, tmp_path / "run")
    assert any("initial values for classifier, classifier_bias" in line for line in ran.lines)
    assert head == any(line.startswith("not taken: output_bias, transform,") for line in ran.lines)
    theirs, back, source = f"hf:{tmp_path / 'hub'}", tmp_path / "back", str(records / "texts.jsonl")
    with few(1):
        convert(str(ran.folder), theirs, silent)
        convert(theirs, str(back), silent)
        found = [evaluate_run(one, source, None, silent) for one in (str(ran.folder), theirs, str(back))]
    for other in found[1:]:
        assert other.metrics() == pytest.approx(found[0].metrics(), rel=1e-5)
    stored, out = load_file(folder / SINGLE), load_file(tmp_path / "hub" / SINGLE)
    for name in ("pooler.dense.weight", "pooler.dense.bias", "encoder.layer.0.output.dense.weight"):
        np.testing.assert_allclose(out[f"bert.{name}"], stored["bert." * head + name], rtol=0, atol=1e-4)
    config, settings = (json.loads((tmp_path / "hub" / name).read_text()) for name in ("config.json", SETTINGS))
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert (config["pad_token_id"], settings["pad_token"]) == (0, "[PAD]")


def test_a_text_is_read_as_an_encoders_tokenizer_writes_it(bert, records, tiny):
    prepared = classifier_of(bert(True, False), records, tiny).data.prepare(silent)
    batch = prepared.splits["train"].batch(np.arange(1))
    first = prepared.tokenizer.decode(batch["tokens"][0][batch["documents"][0] == 0])
    assert first.startswith("[CLS]")
    assert first.endswith("[SEP]")


def test_pairs_of_texts_are_joined_with_types_as_an_encoders_tokenizer_does(bert, tiny, tmp_path, rng):
    words = [["".join(rng.choice([*"abcdefgh"], size=rng.integers(1, 6))) for _ in range(2)] for _ in range(9)]
    pairs = [{"premise": a, "hypothesis": b, "label": int(a < b)} for a, b in words]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/texts.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    train, columns = (
        classifier_of(bert(True, True), tmp_path / "pairs", tiny),
        {"text": "premise", "text_pair": "hypothesis"},
    )
    prepared = replace(train.data, columns=columns, held_out=0.0).prepare(silent)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "plain/tokenizer.json"))
    expected = {(tuple(one.ids), tuple(one.type_ids)) for one in (inner.encode(a, b) for a, b in words)}
    split, found = prepared.splits["train"], set()
    batch = split.batch(np.arange(len(split)))
    for row, documents in enumerate(batch["documents"]):
        for number in range(documents.max() + 1):
            own = documents == number
            found.add((tuple(batch["tokens"][row][own].tolist()), tuple(batch["types"][row][own].tolist())))
    assert found == expected
    assert not batch["types"][batch["documents"] < 0].any()
    one_type = replace(train.model, model=replace(train.model.model, types=1))
    with pytest.raises(UserError, match=r"pairs of texts.* 2 types.*Bert\.types is 1"):
        prepared.check_fits(one_type, train.objective, 64)


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_encoder_without_a_pooler_says_that_it_begins_anew(bert, records, tiny, do, tmp_path):
    train = classifier_of(bert(False, False), records, tiny)
    with pytest.raises(UserError, match=r"pooler/dense: missing[^!]*InitFrom\.paths|InitFrom\.paths[^!]*pooler/dense"):
        do(train, tmp_path / "refused")
    ran = do(classifier_of(tmp_path / "plain", records, tiny, others=("!pooler/*",)), tmp_path / "run")
    assert any("initial values for classifier, classifier_bias, pooler/dense" in line for line in ran.lines)
    assert not any(line.startswith("frozen") for line in ran.lines)


@pytest.mark.full
@pytest.mark.draws(1)
def test_padding_is_no_token_in_which_a_text_ends(trained, records, do, few, tmp_path):
    ended = of("texts", trained, records)
    ended = replace(ended, data=replace(ended.data, end=True), steps=1, sample=None, evaluation=None)
    said = {}
    for name, train in {"ended": ended, "open": replace(ended, data=replace(ended.data, end=False))}.items():
        ran, lines = do(train, tmp_path / name), []
        with few(1):
            convert(str(ran.folder), f"hf:{tmp_path / 'hub' / name}", lines.append)
        config = json.loads((tmp_path / "hub" / name / "config.json").read_text())
        said[name] = config.get("pad_token_id"), any("has no pad_token_id" in line for line in lines)
    assert said == {"ended": (None, True), "open": (ran.train.data.tokenizer.load().bos, False)}


@pytest.mark.parametrize("model", [RewardModel(Bert()), RewardModel(T5()), TextClassifier(T5(), LABELS)])
def test_a_head_is_refused_on_what_is_no_language_model(model):
    with pytest.raises(UserError, match=r"\.model is a (Bert|T5); expected a language model.*also Bert"):
        model.build()
