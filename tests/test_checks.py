"""Ranges of numbers in frozen dataclasses: what is refused, and in which words."""

from dataclasses import dataclass
from math import inf, nan

import pytest

from axon.checks import check_range
from axon.errors import UserError


@dataclass(frozen=True)
class Optimizer:
    share: float = 0.5
    rate: float = 0.1
    steps: int = 1
    seed: int = 0
    clip: float | None = None

    def __post_init__(self):
        check_range(self, "[0, 1)", "share")
        check_range(self, "(0, inf)", "rate", "clip")
        check_range(self, "[1, inf)", "steps")
        check_range(self, "[0, 2**32)", "seed")


@pytest.mark.parametrize(
    "good",
    [{"share": 0}, {"share": 0.999}, {"rate": 5e-324}, {"rate": 1e308}, {"steps": 2**63 - 1}, {"seed": 2**32 - 1}],
)
def test_numbers_in_the_range_are_taken(good):
    Optimizer(**good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"share": 1.2}, "Optimizer.share is 1.2; must be in [0, 1)"),
        ({"share": 1}, "Optimizer.share is 1; must be in [0, 1)"),
        ({"share": -0.1}, "Optimizer.share is -0.1; must be in [0, 1)"),
        ({"share": nan}, "Optimizer.share is nan; must be in [0, 1)"),
        ({"rate": 0.0}, "Optimizer.rate is 0.0; must be above 0"),
        ({"rate": inf}, "Optimizer.rate is inf; must be in (0, inf)"),
        ({"rate": nan}, "Optimizer.rate is nan; must be in (0, inf)"),
        ({"clip": -1.0}, "Optimizer.clip is -1.0; must be above 0, or None"),
        ({"steps": 0}, "Optimizer.steps is 0; must be at least 1"),
        ({"steps": 2**63}, "Optimizer.steps is 9223372036854775808; must be in [1, 2**63)"),
        ({"seed": 2**64}, "Optimizer.seed is 18446744073709551616; must be in [0, 2**32)"),
        ({"seed": -1}, "Optimizer.seed is -1; must be at least 0"),
    ],
)
def test_a_number_outside_is_refused_by_its_field(bad, message):
    with pytest.raises(UserError) as error:
        Optimizer(**bad)
    assert str(error.value) == message
