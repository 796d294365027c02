"""Models that go out as `transformers` opens them: each field in its type there, and the logits that they have here."""

import json

import numpy as np
import pytest
from exports import EXPORTS, FILE, going_out
from reference import load_sketches, relative_error, sketch, tokens, weights
from test_transformers import InMemory, evaluate

from axon.checkpoint.huggingface.config import LOCAL, read_config
from axon.checkpoint.huggingface.load import read_shard
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.nn import parameters, variables
from axon.runtime import nested

NOT_SAID = {("Mixtral", "shared"), ("ViT", "pool")}
"""Fields that no architecture of `transformers` has."""


def test_every_field_of_every_model_goes_out_unlike_its_default():
    same = []
    for kind in {type(model) for model in EXPORTS.values()}:
        models = [vars(model) for model in EXPORTS.values() if type(model) is kind]
        for name, default in vars(kind).get("__dataclass_fields__", {}).items():
            changed = any(model[name] != default.default for model in models)
            if not (changed or name in LOCAL or (kind.__name__, name) in NOT_SAID):
                same.append(f"{kind.__name__}.{name}")
    assert not same


@pytest.mark.parametrize("name", EXPORTS)
def test_a_model_goes_out_as_transformers_opened_it(name):
    """Run tests/models/exports.py and fixtures/make.py exports where it goes out otherwise than before."""
    stored = json.loads(FILE.read_text())[name]
    made = json.loads(json.dumps(going_out(EXPORTS[name])))
    assert made == stored
    for field, value in stored["config"].items():
        assert type(made["config"][field]) is type(value), field


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXPORTS if name != "bert alone"])
def test_what_comes_back_computes_what_transformers_computes(name, placed, compiled, bind):
    stored = json.loads(FILE.read_text())[name]
    table = table_for(EXPORTS[name])
    model = read_config(table, stored["config"])
    module, source = model.build(), InMemory(weights(name, {n: tuple(s) for n, s in stored["shapes"].items()}))
    specs, pieces = parameters(module) | variables(module), pieces_of(table, module, getattr(model, "vocab", None))
    values = {
        path: read_shard(source, pieces, path, tuple((0, size) for size in specs[path].shape), np.float32)
        for path in pieces.of
    }
    ids = tokens(name, getattr(model, "vocab", None) or model.classes)
    _, logits = compiled(placed(), lambda values: evaluate(name, bind(module, nested(values)), ids), values)
    found = sketch(name, "logits", np.asarray(logits))
    assert relative_error(found, load_sketches("exports")[name]) < 1e-5
