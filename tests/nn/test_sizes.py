"""Sizes that models' configs share."""

from types import SimpleNamespace

import pytest

from axon.errors import UserError
from axon.nn.sizes import check_heads, decoder_dims

SIZES = {"vocab": 61, "vocab_multiple": 16, "embed": 24, "heads": 4, "kv_heads": 2, "mlp": 40, "head_dim": None}


def config(**fields):
    return SimpleNamespace(**SIZES | fields)


@pytest.mark.parametrize("head_dim", [None, 8])
def test_a_decoders_axes_have_its_sizes(head_dim):
    found = decoder_dims(config(head_dim=head_dim))
    assert found == {"vocab": 64, "embed": 24, "heads": 4, "kv_heads": 2, "mlp": 40, "head_dim": head_dim or 6}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed": 26}, "embed 26 is not divisible by heads 4; set head_dim"),
        ({"embed": 12}, "head_dim 3 is odd"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(fields, message):
    check_heads(config())
    with pytest.raises(UserError, match=message):
        check_heads(config(**fields))
