"""What a model of the hub is evaluated and trained by, once it is imported: the objective of its family."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import tokenizers
from reports import silent

from axon.checkpoint import Checkpoints, Store
from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.model import open_model
from axon.checkpoint.huggingface.save import write_weights
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError
from axon.layout import Layout
from axon.run.convert import convert
from axon.run.folder import RunFolder
from axon.run.inspect import evaluate_run
from axon.run.trained import run_of
from axon.runtime import Runtime
from axon.train.masked import MaskedToken
from axon.train.objective import NextToken
from axon.train.spans import SpanCorruption
from models.bert import Bert
from models.t5 import T5

BERT = Bert(400, 16, 1, 2, 16, 64)
ENCODER_DECODER = T5(400, 16, 1, 1, 2, 8, 16)
ADDED = ["[CLS]", "[MASK]", *(f"<extra_id_{number}>" for number in reversed(range(8)))]


@pytest.fixture(scope="module")
def corpus(tiny):
    return tiny.data.prepare(silent)


def add(folder: Path) -> None:
    """Give the tokenizer in a folder the `ADDED` tokens, as those of the hub have them."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(ADDED)
    inner.save(str(folder / "tokenizer.json"))


@pytest.fixture
def objective(corpus, tmp_path):
    """objective(model, added): of the run that a model of the hub becomes, with a tokenizer that has `ADDED` or not."""

    def of(model, added):
        config = write_config(table_for(model), model)
        (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": corpus.tokenizer.bos}))
        corpus.tokenizer.save(tmp_path / "tokenizer.json")
        write_weights(tmp_path, [], {}.__getitem__)
        if added:
            add(tmp_path)
        return run_of(open_model(f"hf:{tmp_path}")).objective

    return of


def test_a_family_has_its_objective_with_the_ids_of_its_tokenizer(objective, tiny, corpus):
    ids = corpus.tokenizer.vocab
    assert objective(tiny.model, True) == NextToken()
    assert objective(BERT, True) == MaskedToken(mask_id=ids + 1)
    assert objective(ENCODER_DECODER, True) == SpanCorruption(sentinel_id=ids + len(ADDED) - 1)
    assert objective(BERT, False) == MaskedToken()
    assert objective(ENCODER_DECODER, False) == SpanCorruption()


@pytest.mark.full
@pytest.mark.parametrize("model", [BERT, ENCODER_DECODER])
def test_an_imported_model_is_evaluated_by_it(model, tiny, corpus, few, text, tmp_path):
    folder, name, own = RunFolder(tmp_path / "run"), tmp_path / "model", {BERT: MaskedToken()}
    folder.write(replace(tiny, model=model, objective=own.get(model, SpanCorruption())), {})
    corpus.tokenizer.save(folder.tokenizer)
    with few(1):
        values, variables = Runtime(model, Layout(), devices=jax.devices()).initialise(3)
        with Store(folder.checkpoints, Checkpoints()) as store:
            store.save(0, {"parameters": values, "variables": variables}, {})
        convert(str(folder.path), f"hf:{name}", silent)
    add(name)
    convert(f"hf:{name}", str(tmp_path / "back"), silent)
    with few(1):
        losses = {evaluate_run(one, str(text), 1, silent).loss for one in (tmp_path / "back", Path(f"hf:{name}"))}
    assert len(losses) == 1


def test_sentinels_are_ids_of_the_vocabulary(tiny, corpus):
    corpus.check_fits(ENCODER_DECODER, SpanCorruption(sentinel_id=399), tiny.seq)
    for wrong in (400, 1):
        with pytest.raises(
            UserError, match=rf"sentinel_id is {wrong}; must be in \[2, 400\), for the 3 sentinels of 32"
        ):
            corpus.check_fits(ENCODER_DECODER, SpanCorruption(sentinel_id=wrong), tiny.seq)
