"""Arrays that a file has besides, as copies of others: tied heads and embeddings."""

from dataclasses import replace

import numpy as np
import pytest

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.copies import with_own_arrays
from axon.checkpoint.huggingface.save import Entry, write_weights
from axon.checkpoint.huggingface.tables import table_for
from axon.checkpoint.huggingface.weights import Weights
from models.bert import Bert
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.llama import Llama
from models.t5 import T5

LLAMA = Llama(vocab=7, embed=8, layers=1, heads=2, kv_heads=2, mlp=8, tied=True)
GEMMA = Gemma(vocab=7, embed=8, layers=2, heads=2, kv_heads=2, mlp=8, head_dim=4, window=4)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ONE, OTHER = np.arange(56, dtype=np.float32).reshape(7, 8), np.ones((7, 8), np.float32)


@pytest.fixture
def read(tmp_path):
    def run(model, **arrays):
        named = {name.replace("__", "."): array for name, array in arrays.items()}
        write_weights(tmp_path, [Entry(name, "F32", array.shape) for name, array in named.items()], named.__getitem__)
        weights = Weights(tmp_path)
        return *with_own_arrays(table_for(model), model, weights), weights

    return run


@pytest.mark.parametrize("model", [LLAMA, GEMMA], ids=["Llama", "Gemma"])
def test_a_stored_head_of_a_tied_model_is_ignored_where_it_is_equal_and_read_where_it_differs(model, read):
    assert read(model, model__embed_tokens__weight=ONE, lm_head__weight=ONE)[:2] == (model, [])
    found, (remark,), _ = read(model, model__embed_tokens__weight=ONE, lm_head__weight=OTHER)
    assert found == replace(model, tied=False)
    assert f"{HEAD} differs from {EMBEDDING}" in remark


def test_one_number_that_differs_anywhere_unties(read):
    for at in np.ndindex(ONE.shape):
        head = ONE.copy()
        head[at] += 1
        assert not read(LLAMA, model__embed_tokens__weight=ONE, lm_head__weight=head)[0].tied


def test_a_tied_model_that_is_stored_as_its_head_alone_has_it_as_its_embedding(read):
    found, _, weights = read(LLAMA, lm_head__weight=ONE)
    assert found == LLAMA
    np.testing.assert_array_equal(weights.read(EMBEDDING, (slice(None), slice(None))), ONE)


def test_an_untied_model_s_head_is_its_own_though_it_is_equal(read):
    untied = replace(LLAMA, tied=False)
    assert read(untied, model__embed_tokens__weight=ONE, lm_head__weight=ONE)[:2] == (untied, [])


@pytest.mark.parametrize("prefix", ["", "transformer__"])
def test_gpt2_s_head_is_compared_with_and_without_its_prefix(prefix, read):
    model = GPT2(vocab=7, embed=8, layers=1, heads=2, mlp=8)
    assert read(model, **{f"{prefix}wte__weight": ONE, "lm_head__weight": ONE})[0].tied
    assert not read(model, **{f"{prefix}wte__weight": ONE, "lm_head__weight": OTHER})[0].tied


def test_t5_without_a_stored_head_is_tied_and_with_one_that_differs_is_not_and_either_is_scaled_as_it_was(read):
    model = T5(vocab=7, embed=8, heads=2, head_dim=4, mlp=8, scaled=False)
    assert read(model, shared__weight=ONE)[0] == replace(model, tied=True)
    scaled = replace(model, tied=True, scaled=True)
    assert read(scaled, shared__weight=ONE, lm_head__weight=OTHER)[0] == replace(scaled, tied=False)


@pytest.mark.parametrize(
    ("model", "of", "copy"),
    [
        (T5(vocab=7, embed=8, heads=2, head_dim=4, mlp=8), "shared__weight", "encoder__embed_tokens__weight"),
        (T5(vocab=7, embed=8, heads=2, head_dim=4, mlp=8), "shared__weight", "decoder__embed_tokens__weight"),
        (Bert(), "bert__embeddings__word_embeddings__weight", "cls__predictions__decoder__weight"),
        (Bert(), "cls__predictions__bias", "cls__predictions__decoder__bias"),
    ],
)
def test_another_copy_that_differs_is_refused_by_both_names(model, of, copy, read):
    read(model, **{of: ONE, copy: ONE})
    with pytest.raises(CheckpointError) as caught:
        read(model, **{of: ONE, copy: OTHER})
    assert all(name.replace("__", ".") in str(caught.value) for name in (of, copy))
