"""Sizes that the configs of decoders share."""

from dataclasses import dataclass

import pytest

from axon.errors import UserError
from axon.nn.decoder import DecoderConfig

SIZES = {"vocab": 61, "vocab_multiple": 16, "embed": 24, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 40}


@dataclass(frozen=True)
class Mine(DecoderConfig):
    """A family of its own."""


@pytest.mark.parametrize("head_dim", [None, 8])
def test_a_decoders_axes_have_its_sizes(head_dim):
    found = Mine(**SIZES, head_dim=head_dim).dims
    assert found == {"vocab": 64, "embed": 24, "heads": 4, "kv_heads": 2, "mlp": 40, "head_dim": head_dim or 6}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed": 26}, "Mine: embed 26 is not divisible by heads 4; set head_dim"),
        ({"embed": 12}, "Mine: head_dim 3 is odd"),
        ({"head_dim": 5}, "Mine: head_dim 5 is odd"),
        ({"kv_heads": 3}, "Mine: heads 4 is not a multiple of kv_heads 3"),
        ({"mlp": 0}, "Mine.mlp is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Mine(**SIZES | fields)
