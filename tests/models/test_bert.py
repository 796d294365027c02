"""BERT: published sizes, and what cannot be."""

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.nn import Inputs, parameters
from models.bert import Bert

BASE = {"vocab": 40, "embed": 24, "layers": 2, "heads": 4, "mlp": 32, "positions": 16}


def test_the_base_model_has_the_published_number_of_parameters():
    """109,514,298 with the head of masked tokens: 110M in the paper, which counts its pooler too."""
    assert sum(spec.size for spec in parameters(Bert().build()).values()) == 109_514_298


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": 0}, "Bert.types is 0; must be at least 1"),
        ({"dropout": 1.0}, "Bert.dropout is 1.0; must be in [0, 1)"),
        ({"embed": 26}, "Bert: embed 26 is not divisible by heads 4"),
        ({"remat": "minimum"}, "Did you mean 'minimal'?"),
    ],
)
def test_a_shape_that_is_none_is_refused(fields, message):
    with pytest.raises(UserError) as caught:
        Bert(**BASE | fields)
    assert message in str(caught.value)


def test_a_sequence_longer_than_the_embeddings_of_positions_is_refused():
    ids = np.zeros((1, 17), np.int32)
    with pytest.raises(UserError, match="sequences of 17 positions, and embeddings for 16"):
        jax.eval_shape(lambda: Bert(**BASE).build().hidden(Inputs(ids, ids)))
