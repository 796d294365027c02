"""Ranges of numbers in frozen dataclasses: what is refused, and in which words."""

import re
from dataclasses import dataclass, replace
from math import inf, nan

import pytest

from axon.checkpoint import Checkpoints
from axon.checks import check_range
from axon.errors import UserError
from axon.parallel.outer import DiLoCo, SlowMo
from axon.run import Evaluation
from axon.serve.http.limits import Limits
from axon.train.faults import Faults
from axon.train.optimizers import Constant
from axon.train.optimizers.soap import SOAP


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


@pytest.mark.parametrize("bad", [nan, inf, -inf, -1, -1e-9, 1e300, 2**63])
@pytest.mark.parametrize(
    ("valid", "names"),
    [
        (Checkpoints(), "every keep_every keep_hours local_every"),
        (Evaluation(), "every"),
        (Faults(), "hang_seconds hang_seconds_besides replay_every"),
        (Limits(), "body_seconds queue_seconds drain_seconds"),
        (DiLoCo(1), "every"),
        (SlowMo(1), "every"),
        (SOAP(Constant(0.1)), "every"),
    ],
)
def test_a_duration_or_an_interval_that_is_none_is_refused(valid, names, bad):
    for name in names.split():
        if bad != 1e300 or "every" not in name:  # of which configurations take whole numbers alone
            with pytest.raises(
                UserError, match=rf"^{type(valid).__name__}\.{name} is {re.escape(repr(bad))}; must be "
            ):
                replace(valid, **{name: bad})
