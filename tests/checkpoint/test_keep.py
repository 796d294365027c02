"""Which checkpoints are kept, by step, by time and by held-out loss."""

import math

import pytest

from axon.checkpoint import Checkpoints
from axon.checkpoint.keep import steps_to_keep
from axon.errors import UserError

SAVED = {step: 40 * 60 * 10**9 * step for step in range(10)}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep": 2}, [8, 9]),
        ({"keep": 1, "keep_every": 4}, [0, 4, 8, 9]),
        ({"keep": 1, "keep_hours": 2}, [0, 3, 6, 9]),
        ({"keep": 1, "keep_hours": 0.5}, list(range(10))),
        ({"keep": 1, "keep_best": 2}, [3, 5, 9]),
        ({"keep": 1, "keep_every": 8, "keep_best": 1}, [0, 3, 8, 9]),
    ],
)
def test_a_checkpoint_is_kept_if_any_rule_keeps_it(settings, steps):
    losses = {0: 9.0, 2: math.nan, 3: 1.0, 5: 2.0, 6: 3.0, 100: 0.5}
    assert sorted(steps_to_keep(Checkpoints(every=1, **settings), losses, SAVED)) == steps


def test_as_many_intact_ones_are_kept_whatever_is_damaged(rng):
    settings = Checkpoints(every=1, keep=2, keep_best=1)
    bad = {int(step) for step in rng.choice(10, 4, replace=False)}
    losses = {step: float(step) for step in SAVED}
    kept = steps_to_keep(settings, losses, SAVED, bad.__contains__)
    intact = sorted({*SAVED} - bad)
    assert kept - bad == {*intact[-2:], intact[0]}
    assert min(kept & bad, default=9) > intact[-2]


@pytest.mark.parametrize("hours", [1e30, 0, float("inf")])
def test_hours_that_no_run_has_are_refused(hours):
    with pytest.raises(UserError, match=r"Checkpoints\.keep_hours is .*must be in \(0, 10\*\*6\]"):
        Checkpoints(keep_hours=hours)
