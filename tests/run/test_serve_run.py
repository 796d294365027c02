"""A trained run behind the server."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from reports import silent
from safetensors.numpy import save_file

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import known
from axon.checkpoint.huggingface.weights import SINGLE
from axon.errors import UserError
from axon.nn import Routing
from axon.run.folder import RunFolder
from axon.run.inspect import generate_text
from axon.run.serve_run import serve_run
from axon.serve import Engine, answers
from axon.serve.capacity import Capacity
from axon.serve.http import serve as server
from axon.serve.http.limits import Limits
from axon.serve.pooling import Pooling
from axon.serve.replicas import Replicas
from axon.serve.request import Request, Sampling
from models.bert import Bert
from models.deepseek import DeepSeek
from models.llama import Llama
from models.qwen3_next import Qwen3Next

SMALL = Capacity(requests=2, tokens=16, length=64)


@pytest.fixture
def served(monkeypatch):
    """What would be served."""
    found = []
    monkeypatch.setattr(server, "serve", lambda model, *_: found.append(model) or True)
    return found


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("mesh", [None, "{'data': 2, 'tensor': 2}"])
def test_a_run_answers_as_it_generates_on_one_device_or_split_as_a_file_says(mesh, trained, served, tmp_path, few):
    layout = None
    if mesh is not None:
        layout = tmp_path / "split.gin"
        layout.write_text(f"Layout.mesh = {mesh}\n")
    capacity = Capacity(requests=1, tokens=16, length=128)  # as one text is generated with
    with few(4 if mesh else 1):
        assert serve_run(trained.folder, layout, None, capacity, Limits(), "127.0.0.1", 0, silent)
    (model,) = served
    tokenizer, sampling = model.engine.tokenizer, Sampling(8, temperature=0)
    (answer,) = answers(model.engine, [Request(tuple(tokenizer.prompt("x")), sampling)])
    assert isinstance(model.engine, Engine if mesh is None else Replicas)
    assert "x" + answer.text == generate_text(trained.folder, "x", sampling, silent)
    assert model.name == trained.folder.name
    assert model.chat.ids([{"role": "user", "content": "hello"}], [])


@pytest.mark.full
def test_an_encoder_decoder_answers_as_it_generates_and_embeds_nothing(answering, served, few):
    capacity = Capacity(requests=1, tokens=16, length=128)
    with few(1):
        assert serve_run(answering, None, None, capacity, Limits(), "127.0.0.1", 0, silent)
        with pytest.raises(UserError, match="--embeddings"):
            serve_run(answering, None, None, capacity, Limits(), "127.0.0.1", 0, silent, embeddings=True)
    tokenizer, sampling = served[0].engine.tokenizer, Sampling(8, temperature=0)
    (answer,) = answers(served[0].engine, [Request(tuple(tokenizer.prompt("alpha")), sampling)])
    assert answer.text == generate_text(answering, "alpha", sampling, silent)


@pytest.mark.full
def test_drafts_of_the_text_or_of_a_model_change_no_text(trained, served, few):
    for draft in (None, "ngram", str(trained.folder)):
        with few(1):
            assert serve_run(trained.folder, None, draft, SMALL, Limits(), "127.0.0.1", 0, silent)
    engines = [model.engine for model in served]
    request = Request(tuple(engines[0].tokenizer.prompt("x")), Sampling(24, seed=3))
    plain, *drafted = (["".join(update.text for update in engine.stream(request))] for engine in engines)
    assert drafted == [plain, plain]
    stats = engines[2].stats()
    assert stats.accepted == stats.drafted > 0, "the model draws what it drafts itself"


def test_a_draft_model_of_another_tokenizer_is_refused(trained, copied, few):
    changed = json.loads((file := RunFolder.existing(copied).tokenizer).read_text())
    changed["added_tokens"][0]["content"] = "<other>"
    file.write_text(json.dumps(changed))
    with few(1), pytest.raises(UserError, match=r"--draft .* has another tokenizer"):
        serve_run(trained.folder, None, str(copied), SMALL, Limits(), "127.0.0.1", 0, silent)


def test_a_layout_that_does_not_fit_is_refused(trained, tmp_path):
    layout = tmp_path / "split.gin"
    layout.write_text("Layout.mesh = {'tensor': 16}\n")
    with pytest.raises(UserError, match="devices"):
        serve_run(trained.folder, layout, None, SMALL, Limits(), "127.0.0.1", 0, silent)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("mesh = {'pipe': 2}", "'pipe' = 2"),
        ("mesh = {'context': 2}", "'context' = 2"),
        ("context = 'ring'", "Layout.context"),
        ("mesh = {'tensor': 2}\nLayout.overlap = ('tensor',)", "Layout.overlap"),
        ("microbatches = 2", "Layout.microbatches"),
        ("zero = 1", "Layout.zero"),
    ],
)
def test_what_serving_does_not_use_of_a_layout_is_refused(line, named, trained, tmp_path, few):
    layout = tmp_path / "split.gin"
    layout.write_text(f"Layout.{line}\n")
    with few(2), pytest.raises(UserError, match=named):
        serve_run(trained.folder, layout, None, SMALL, Limits(), "127.0.0.1", 0, silent)


@pytest.fixture
def hub(trained, tmp_path, rng):
    """hub(architecture, model, **of config.json): a folder with random weights and the run's tokenizer."""

    def written(architecture, model, **more):
        table = known()[architecture]
        shapes = pieces_of(table, model.build(), model.vocab).shapes
        save_file({n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}, tmp_path / SINGLE)
        (tmp_path / "config.json").write_text(json.dumps(write_config(table, model) | more))
        shutil.copy(RunFolder.existing(trained.folder).tokenizer, tmp_path / "tokenizer.json")
        return tmp_path

    return written


@pytest.mark.full
def test_an_encoder_of_the_hub_serves_embeddings_alone(hub, served, few):
    folder = hub("BertModel", Bert(400, 16, 1, 2, 16, positions=64, head=False), bos_token_id=0, eos_token_id=0)
    types = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": "1_Pooling"} for kind in types]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    with few(1):
        assert serve_run(f"hf:{folder}", None, None, Capacity(), Limits(), "127.0.0.1", 0, silent)
        with pytest.raises(UserError, match="is an encoder, which writes no text to guess"):
            serve_run(f"hf:{folder}", None, "ngram", Capacity(), Limits(), "127.0.0.1", 0, silent)
    (model,) = served
    assert not model.writes
    assert (model.embedder.pooling, model.embedder.max_length, model.embedder.width) == (Pooling("cls"), 40, 16)
    model.embedder.submit([[1, 2, 3]])
    ((embedding,),) = model.embedder.step().values()
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)


@pytest.mark.full
def test_requests_have_the_defaults_of_generation_config_unless_it_is_turned_off(hub, served, few):
    folder, lines = hub("LlamaForCausalLM", Llama(400, 16, 1, 2, 1, 32), bos_token_id=0, eos_token_id=0), []
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.5, "top_k": 9}))
    with few(1):
        for on in (True, False):
            assert serve_run(f"hf:{folder}", None, None, SMALL, Limits(), "127.0.0.1", 0, lines.append, defaults=on)
    assert [model.defaults for model in served] == [{"temperature": 0.5, "top_k": 9}, {}]
    assert len([line for line in lines if "have temperature 0.5, top_k 9, of generation_config.json" in line]) == 1


@pytest.mark.full
def test_a_run_embeds_texts_where_it_is_asked_to(trained, served, few):
    with few(1):
        assert serve_run(trained.folder, None, None, SMALL, Limits(), "127.0.0.1", 0, silent, embeddings=True)
    (model,) = served
    assert model.writes
    assert (model.embedder.pooling, model.embedder.max_length) == (Pooling("last"), 64)


WITH_BLOCK = {
    "DeepseekV3ForCausalLM": DeepSeek(
        400, 32, 2, 1, 4, 48, 16, Routing(4, 2, "sigmoid", scale=2.5, groups=2, kept_groups=1, bias_rate=0.001),
        q_latent=16, kv_latent=12, nope_dim=6, rope_dim=4, value_dim=8, shared=16, multi_token=True,
    ),
    "Qwen3NextForCausalLM": Qwen3Next(
        400, 32, 2, 4, kv_heads=2, mlp=16, head_dim=8, shared=16, routing=Routing(4, 2),
        delta_heads=2, per_head=2, key_dim=8, value_dim=6, full_every=2, multi_token=True,
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("architecture", WITH_BLOCK)
def test_a_models_own_multi_token_block_is_read_and_guesses_where_it_is_asked_for(architecture, hub, served, few):
    block, ids = WITH_BLOCK[architecture], {"bos_token_id": 0, "eos_token_id": 0}
    folder = hub(architecture, block, **ids)
    with few(1):
        for draft in (None, "mtp"):
            assert serve_run(f"hf:{folder}", None, draft, SMALL, Limits(), "127.0.0.1", 0, silent)
        hub(architecture, replace(block, multi_token=False), **ids)
        with pytest.raises(UserError, match="--draft mtp: the model has no block that predicts the token after the"):
            serve_run(f"hf:{folder}", None, "mtp", SMALL, Limits(), "127.0.0.1", 0, silent)
    plain, guessing = (model.engine for model in served)
    request = Request((5, 6, 7), Sampling(40, seed=3))
    texts = [next(iter(answers(engine, [request]))).text for engine in (plain, guessing)]
    assert texts[0] == texts[1]
    assert guessing.stats().drafted > 0
    assert not plain.runtime.module.has_mtp


@pytest.mark.full
def test_axon_serve_answers_and_ends_well_on_a_signal(trained, tmp_path):
    code = "from axon.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(trained.folder), "--port", "0", "--requests", "2"]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        url = next(found[0] for line in process.stdout if (found := re.findall(r"serving (http://\S+)", line)))
        body = json.dumps({"model": trained.folder.name, "prompt": "x", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGTERM)
        ended = time.monotonic()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - ended < 30
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.full
def test_ctrl_c_while_it_compiles_ends_it_at_once_in_one_line(trained):
    code = "from axon.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(trained.folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("compiling" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors.strip()) == (130, "axon: interrupted by SIGINT")
