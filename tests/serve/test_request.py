"""What may be asked."""

import dataclasses

import pytest

from axon.errors import UserError
from axon.serve import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("tokens", wrong) for wrong in (0, 2**31)),
        *(("temperature", wrong) for wrong in (-0.1, 1e7, float("inf"))),
        *(("top_k", wrong) for wrong in (0, 2**31)),
        *(("top_p", wrong) for wrong in (0.0, 1.1)),
        ("min_p", 1.5),
        *(("seed", wrong) for wrong in (-1, 2**64)),
        *(("min_tokens", wrong) for wrong in (-1, 101)),
    ],
)
def test_what_cannot_be_drawn_by_is_refused(field, value):
    with pytest.raises(UserError, match=rf"Sampling\.{field} is {value}; must be"):
        dataclasses.replace(Sampling(), **{field: value})
