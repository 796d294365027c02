"""Models of Hugging Face's as runs, runs as such models, and both used without conversion."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from reports import silent

from axon.checkpoint import Reader
from axon.checkpoint.huggingface.config import read_config
from axon.data import TokenizerFile
from axon.errors import UserError
from axon.nn import DynamicScaling, Rope
from axon.run import Sample, program
from axon.run.convert import _config, convert
from axon.run.inspect import evaluate_run, generate_text
from axon.run.trained import open_trained
from axon.runtime import flattened
from axon.serve.chat import Chat
from axon.serve.pooling import Pooling
from axon.serve.request import Sampling
from axon.serve.sentence_transformers import sentences_of
from axon.train.spans import SpanCorruption
from models.t5 import T5


@pytest.fixture(scope="module")
def imported(hub, few, tmp_path_factory):
    """That folder as a run."""
    folder = tmp_path_factory.mktemp("imported") / "run"
    convert(f"hf:{hub}", str(folder), silent)
    return folder


def restored(made, folder):
    parts = {"parameters": made.abstract_state().parameters}
    return flattened(Reader(folder / "checkpoints").restore_parts(parts)["parameters"])


def test_parameters_come_back_bit_for_bit_and_a_second_time_the_files_are_the_same(
    trained, imported, hub, few, tmp_path
):
    with few(1):
        made = program(trained.train)
        before, after = restored(made, trained.folder), restored(made, imported)
        convert(str(imported), f"hf:{tmp_path / 'again'}", silent)
    assert all(np.array_equal(before[path], after[path]) for path in before)
    files = {path.name for path in hub.iterdir()}
    assert files == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in files:
        assert (hub / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.full
def test_the_same_text_and_loss_with_and_without_conversion(trained, imported, hub, few, text):
    sampling = Sampling(tokens=12, temperature=0)
    names = (trained.folder, imported, f"hf:{hub}")
    with few(1):
        texts = {generate_text(name, "alpha", sampling, silent) for name in names}
        losses = {evaluate_run(name, str(text), 2, silent) for name in names}
    assert len(texts) == len(losses) == 1


@pytest.mark.full
def test_an_encoder_decoder_answers_the_same_as_a_run_as_a_model_and_as_a_run_of_that(tiny, do, few, text, tmp_path):
    small = T5(330, 32, 1, 1, 4, 8, 64, start_id=7, dropout=0.0)
    sample = Sample("alpha", Sampling(tokens=12, temperature=0))
    run = do(replace(tiny, model=small, objective=SpanCorruption(), sample=sample), tmp_path / "run", steps=2)
    names = (run.folder, f"hf:{tmp_path / 'hub'}", tmp_path / "again")
    with few(1):
        for source, target in itertools.pairwise(names):
            convert(str(source), str(target), silent)
        texts = {generate_text(name, "alpha", sample.sampling, silent) for name in names}
        losses = {evaluate_run(name, str(text), 2, silent) for name in names}
    assert len(texts) == len(losses) == 1
    assert texts.pop() in run.lines
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hub" / file).read_text())["decoder_start_token_id"] == 7


def test_the_length_of_training_is_known_with_and_without_conversion(trained, imported, hub):
    names = (trained.folder, imported, f"hf:{hub}")
    assert [open_trained(name).trained_length for name in names] == [trained.train.seq] * 3


def test_what_came_with_a_model_goes_out_again(imported, hub, few, tmp_path):
    """Fields that Axon does not model, a chat template, and dtypes."""
    config = json.loads((imported / "huggingface" / "config.json").read_text()) | {"initializer_range": 0.3}
    (imported / "huggingface" / "config.json").write_text(json.dumps(config))
    (imported / "huggingface" / "chat_template.jinja").write_text("{{ messages }}")
    dtypes = json.loads((imported / "huggingface" / "dtypes.json").read_text())
    (imported / "huggingface" / "dtypes.json").write_text(json.dumps(dict.fromkeys(dtypes, "BF16")))
    with few(1):
        convert(str(imported), f"hf:{tmp_path / 'out'}", silent, shard=2**14)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dtypes.keys()
    sizes = [path.stat().st_size for path in hub.glob("*.safetensors")]
    assert index["metadata"]["total_size"] < sum(sizes) / 2 + 1


@pytest.fixture(scope="module")
def furnished(hub, tmp_path_factory):
    """The model of the hub with all that a model may bring: a template, defaults of generation, a pooling."""
    folder = tmp_path_factory.mktemp("furnished") / "model"
    shutil.copytree(hub, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    ids = json.loads((hub / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(ids | {"temperature": 0.6, "top_k": 7}))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return folder


def used(name):
    """How a model's folder says that it is used: the ids of a chat, and the pooling of its embeddings."""
    trained = open_trained(name)
    chat = Chat.of(trained.companions, trained.tokenizer.load())
    return chat.ids([{"role": "user", "content": "alpha"}]), sentences_of(trained.companions, Pooling("last"))


def test_a_converted_run_is_used_as_the_model_was_and_all_files_go_out_again(furnished, hub, few, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    convert(f"hf:{furnished}", str(run), silent)
    assert used(run) == used(f"hf:{furnished}") != used(f"hf:{hub}")
    with few(1):
        convert(str(run), f"hf:{out}", silent)
    files = [path.relative_to(furnished) for path in furnished.rglob("*") if path.is_file()]
    assert {path: (out / path).read_bytes() for path in files} == {
        path: (furnished / path).read_bytes() for path in files
    }


@pytest.mark.full
def test_a_run_that_begins_with_a_model_is_used_as_the_model_was(furnished, hub, tiny, do, few, tmp_path):
    tokenizer = TokenizerFile(str(furnished / "tokenizer.json"))
    first = replace(tiny, init_from=f"hf:{furnished}", data=replace(tiny.data, tokenizer=tokenizer), sample=None)
    do(first, tmp_path / "first", steps=1)
    do(replace(first, init_from=str(tmp_path / "first")), tmp_path / "second", steps=1)
    for name in ("first", "second"):
        assert used(tmp_path / name) == used(f"hf:{furnished}") != used(f"hf:{hub}")
    with few(1):
        convert(str(tmp_path / "second"), f"hf:{tmp_path / 'out'}", silent)
    assert used(f"hf:{tmp_path / 'out'}") == used(f"hf:{furnished}")
    defaults = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (defaults["temperature"], defaults["top_k"]) == (0.6, 7)


@pytest.mark.full
def test_a_run_begins_with_the_weights_of_a_model(tiny, hub, do, tmp_path):
    tokenizer = TokenizerFile(str(hub / "tokenizer.json"))
    train = replace(tiny, init_from=f"hf:{hub}", data=replace(tiny.data, tokenizer=tokenizer))
    fresh = do(replace(tiny, data=train.data), tmp_path / "fresh", steps=1)
    began = do(train, tmp_path / "began", steps=1)
    loss = [
        float(line.split("validation loss ")[1].split()[0])
        for run in (fresh, began)
        for line in run.lines
        if "validation loss" in line
    ]
    assert loss[1] < loss[0]
    assert f"parameters from hf:{hub}" in began.lines
    other = replace(train, model=replace(tiny.model, norm_eps=1e-3))
    with pytest.raises(UserError, match=r"Llama\.norm_eps is 0\.001, and 1e-05"):
        do(other, tmp_path / "other", steps=1)
    with pytest.raises(UserError, match="its tokenizer differs from this run's"):
        do(replace(train, data=tiny.data), tmp_path / "tokens", steps=1)


def test_the_length_of_training_does_not_change_frequencies(tiny, tmp_path):
    model = replace(tiny.model, rope=Rope(scaling=DynamicScaling(2.0, 16)))
    config, table = _config(replace(tiny, model=model), tmp_path)
    assert read_config(table, config).rope == model.rope


def test_what_cannot_be_converted_is_said(hub, trained, tmp_path):
    with pytest.raises(UserError, match="one of the two begins with hf:"):
        convert(str(trained.folder), str(tmp_path / "out"), silent)
    with pytest.raises(UserError, match="is there already"):
        convert(str(trained.folder), f"hf:{hub}", silent)
    with pytest.raises(UserError, match=r"there is no folder .*nothing; expected one, or a model's name"):
        generate_text(f"hf:{tmp_path / 'nothing'}", "x", Sampling(), silent)
    with pytest.raises(UserError, match=r"has no config\.json"):
        generate_text(f"hf:{tmp_path}", "x", Sampling(), silent)
    with pytest.raises(UserError, match="has no text of its own to evaluate on: give --source"):
        evaluate_run(f"hf:{hub}", None, None, silent)
    with pytest.raises(UserError, match="is not the folder of a run"):
        convert(str(hub), f"hf:{tmp_path / 'out'}", silent)
