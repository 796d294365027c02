"""A trained run behind the server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from axon.errors import UserError
from axon.run.folder import RunFolder
from axon.run.inspect import generate_text
from axon.run.served import serve_run
from axon.serve import Engine, answers
from axon.serve.capacity import Capacity
from axon.serve.http import serve as server
from axon.serve.http.limits import Limits
from axon.serve.replicas import Replicas
from axon.serve.request import Request, Sampling

SMALL = Capacity(requests=2, tokens=16, length=64)


@pytest.fixture
def served(monkeypatch):
    """What would be served."""
    found = []
    monkeypatch.setattr(server, "serve", lambda model, *_: found.append(model) or True)
    return found


def silent(line):
    pass


@pytest.mark.few(mesh=(None,))
@pytest.mark.parametrize("mesh", [None, "{'data': 2, 'tensor': 2}"])
def test_a_run_answers_as_it_generates_on_one_device_or_split_as_a_file_says(mesh, trained, served, tmp_path, few):
    layout = None
    if mesh is not None:
        layout = tmp_path / "split.gin"
        layout.write_text(f"Layout.mesh = {mesh}\n")
    with few(4 if mesh else 1):
        assert serve_run(trained.folder, layout, None, SMALL, Limits(), "127.0.0.1", 0, silent)
    (model,) = served
    tokenizer, sampling = model.engine.tokenizer, Sampling(8, temperature=0)
    (answer,) = answers(model.engine, [Request(tuple(tokenizer.prompt("x")), sampling)])
    assert isinstance(model.engine, Engine if mesh is None else Replicas)
    assert "x" + answer.text == generate_text(trained.folder, "x", sampling, silent)
    assert model.name == trained.folder.name
    assert model.chat.ids([{"role": "user", "content": "hello"}], [])


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
