"""BERT: published sizes, and an encoder without its head."""

import dataclasses

import jax
import numpy as np
import pytest

from axon.checkpoint.huggingface.config import read_config, write_config
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError
from axon.nn import Inputs, parameters
from axon.train.masked import MaskedToken
from models.bert import Bert

BASE = {"vocab": 40, "embed": 24, "layers": 2, "heads": 4, "mlp": 32, "positions": 16}


def test_the_base_model_has_the_published_number_of_parameters():
    """109,514,298 with the head of masked tokens: 110M in the paper, which counts its pooler too."""
    assert sum(spec.size for spec in parameters(Bert().build()).values()) == 109_514_298


def test_without_its_head_it_is_the_encoder_of_the_same_names():
    """As sentence-transformers' models are published: `BertModel`, whose names lack what comes before the encoder's."""
    masked, alone = Bert(**BASE), Bert(**BASE, head=False)
    tables = [table_for(config) for config in (masked, alone)]
    assert [table.name for table in tables] == ["BertForMaskedLM", "BertModel"]
    names = [pieces_of(table, one.build(), 40).shapes for table, one in zip(tables, (masked, alone), strict=True)]
    assert names[1] == {n.removeprefix("bert."): s for n, s in names[0].items() if not n.startswith("cls.")}
    assert read_config(tables[1], write_config(tables[1], alone)) == dataclasses.replace(alone, dropout=0.1)
    with pytest.raises(UserError, match="Bert with head = True; build\\(\\) returns a BertEncoder"):
        MaskedToken().check(alone.build())


def test_a_sequence_longer_than_the_embeddings_of_positions_is_refused():
    ids = np.zeros((1, 17), np.int32)
    with pytest.raises(UserError, match="sequences of 17 positions, and embeddings for 16"):
        jax.eval_shape(lambda: Bert(**BASE).build().hidden(Inputs(ids, ids)))
