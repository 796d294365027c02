"""A trained model in 8 bits: of a run and of the hub the same, as served and as generated."""

import pytest

from axon.run.convert import convert
from axon.run.inspect import generate_text
from axon.run.served import serve_run
from axon.serve import answers
from axon.serve.capacity import Capacity
from axon.serve.http import serve as server
from axon.serve.http.limits import Limits
from axon.serve.request import Request, Sampling

GREEDY = Sampling(8, temperature=0)


def silent(line):
    pass


@pytest.fixture
def served(monkeypatch):
    """served(path, weights): how the engine that `axon serve` would run goes on after "x"."""
    models = []
    monkeypatch.setattr(server, "serve", lambda model, *_: models.append(model) or True)
    capacity = Capacity(requests=2, tokens=16, length=64)

    def text(path, weights):
        assert serve_run(path, None, "ngram", capacity, Limits(), "127.0.0.1", 0, silent, weights=weights)
        engine = models.pop().engine
        (answer,) = answers(engine, [Request(tuple(engine.tokenizer.prompt("x")), GREEDY)])
        return answer.text

    return text


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_a_run_and_its_copy_as_a_model_of_the_hub_write_the_same_served_and_generated(
    weights, trained, few, tmp_path, served
):
    """Each with its like: in bfloat16 the two ways of decoding may differ where two logits are nearly equal."""
    said = []
    with few(1):
        convert(str(trained.folder), f"hf:{tmp_path}", silent)
        paths = (trained.folder, f"hf:{tmp_path}")
        of_run, of_hub = (generate_text(path, "x", GREEDY, said.append, weights) for path in paths)
        served_run, served_hub = (served(path, weights) for path in paths)
    assert of_run == of_hub
    assert served_run == served_hub
    assert any(line.startswith(f"weights: {weights}, ") for line in said)
