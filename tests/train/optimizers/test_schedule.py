"""Schedules at their key steps, and what they refuse."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.train.optimizers import WSD, AdamW, Constant, Cosine, Linear, Muon, OneBitAdam
from axon.train.optimizers.schedule import schedule_notices


def rates(schedule, steps):
    return [float(schedule.function()(jnp.int32(step))) for step in steps]


@pytest.mark.parametrize(
    "schedule",
    [Constant(0.3, warmup=4), Cosine(0.3, 4, 20), Linear(0.3, 4, 20), WSD(0.3, 4, 20, decay=5)],
    ids=lambda s: type(s).__name__,
)
def test_warm_up_rises_evenly_from_the_first_step_to_the_peak(schedule):
    assert rates(schedule, range(5)) == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3])


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates(Constant(0.3), [0, 100]) == pytest.approx([0.3, 0.3])
    assert rates(Cosine(0.3, 0, 10), [0]) == pytest.approx([0.3])
    assert rates(Constant(0.3, warmup=1), [0, 1, 2]) == pytest.approx([0.3, 0.3, 0.3])


def test_the_cosine_falls_to_its_floor_and_stays():
    peak, warmup, steps, floor = 0.3, 10, 110, 0.1
    expected = [peak * (floor + (1 - floor) * (1 + math.cos(math.pi * t)) / 2) for t in (0, 0.25, 0.5, 1, 1)]
    made = rates(Cosine(peak, warmup, steps, floor), [10, 35, 60, 110, 500])
    assert made == pytest.approx(expected, rel=1e-5)


def test_the_line_falls_to_its_floor_and_stays():
    made = rates(Linear(0.4, 10, 110, floor=0.5), [10, 60, 110, 500])
    assert made == pytest.approx([0.4, 0.3, 0.2, 0.2])


def test_warm_up_stable_decay_holds_the_peak_until_its_last_steps():
    made = rates(WSD(0.4, 10, 110, decay=20, floor=0.25), [10, 50, 90, 100, 110, 500])
    assert made == pytest.approx([0.4, 0.4, 0.4, 0.25, 0.1, 0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(0.3, 10, 10), r"Cosine.steps is 10, and warm-up and decay alone take 10; raise steps"),
        (lambda: Linear(0.3, 20, 10), r"Linear.steps is 10, and warm-up"),
        (lambda: WSD(0.3, 5, 10, decay=6), r"WSD.steps is 10, and warm-up and decay alone take 11"),
        (lambda: WSD(0.3, 5, 10, decay=0), r"WSD.decay is 0; must be at least 1"),
        (lambda: Constant(0.3, warmup=-1), r"Constant.warmup is -1; must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("kind", [Linear, Cosine, partial(WSD, decay=2)], ids=["Linear", "Cosine", "WSD"])
def test_a_compiled_rate_is_never_below_its_floor_and_is_the_floor_from_the_last_step_on(kind):
    for floor in (0.0, 0.3):
        for steps in range(10, 400, 44):
            rate = jax.jit(jax.vmap(kind(peak=0.01, warmup=7, steps=steps, floor=floor).function()))
            made, least = np.asarray(rate(jnp.arange(steps + 9))), np.float32(floor * 0.01)
            assert (made[6:] >= least).all(), (steps, floor)
            assert (made <= np.float32(0.01)).all(), (steps, floor)
            assert (made[steps:] == least).all(), (steps, floor)


def test_a_run_that_is_longer_or_shorter_than_its_schedule_is_told():
    muon = Muon(Linear(0.1, 2, 20), rest=AdamW(WSD(0.1, 2, 20, decay=5)))
    assert schedule_notices(muon, 20) == []
    assert schedule_notices(AdamW(Constant(0.1, warmup=4)), 20) == []
    longer = schedule_notices(muon, 30)
    assert [line for line in longer if "Train.steps is 30, and Linear.steps 20: the rate is 0 in the last 10" in line]
    assert len(longer) == 2
    shorter = schedule_notices(muon, 10)
    assert "Linear.steps 20: the run ends before the rate has fallen, at 0.0611 of a peak of 0.1" in shorter[0]
    assert "WSD.steps 20" in shorter[1]
    (line,) = schedule_notices(OneBitAdam(Constant(0.1), warmup=20), 20)
    assert "OneBitAdam.warmup 20: nothing is compressed" in line
    (line,) = schedule_notices(AdamW(Constant(0.1, warmup=40)), 20)
    assert "Constant.warmup = 40" in line
