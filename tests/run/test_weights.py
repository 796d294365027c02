"""A trained model in 8 bits: of a run and of the hub the same, as served and as generated."""

import pytest
from reports import silent

from axon.run.convert import convert
from axon.run.inspect import generate_text
from axon.run.serve_run import serve_run
from axon.serve import answers
from axon.serve.capacity import Capacity
from axon.serve.http import serve as server
from axon.serve.http.limits import Limits
from axon.serve.request import Request, Sampling

GREEDY = Sampling(8, temperature=0)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_a_run_and_its_copy_as_a_model_of_the_hub_write_the_same_served_and_generated(
    weights, trained, few, tmp_path, monkeypatch
):
    served, said = [], []
    monkeypatch.setattr(server, "serve", lambda model, *_: served.append(model) or True)
    with few(1):
        convert(str(trained.folder), f"hf:{tmp_path}", silent)
        of_run, of_hub = (
            generate_text(path, "x", GREEDY, said.append, weights) for path in (trained.folder, f"hf:{tmp_path}")
        )
        capacity = Capacity(requests=2, tokens=16, length=64)
        assert serve_run(trained.folder, None, "ngram", capacity, Limits(), "127.0.0.1", 0, silent, weights=weights)
    (model,) = served
    (answer,) = answers(model.engine, [Request(tuple(model.engine.tokenizer.prompt("x")), GREEDY)])
    assert of_run == of_hub == "x" + answer.text
    assert any(line.startswith(f"weights: {weights}: ") for line in said)
