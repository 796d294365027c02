"""Failures: the interval is the best there is, and the share that trains is that of a simulated machine."""

import numpy as np
import pytest

from axon.plan.predict.failures import LEAST_SAVE, Failures

DAY = 86_400.0


@pytest.mark.parametrize("devices", [1, 100, 16_384])
@pytest.mark.parametrize("save", [5.0, 60.0, 600.0])
def test_no_other_interval_trains_a_larger_share(devices, save):
    one = Failures(mtbf=2000 * DAY, restart=300.0, save=save)
    every = [one.goodput(devices, interval) for interval in np.geomspace(1.0, 1e7, 4000)]
    assert one.goodput(devices) == pytest.approx(max(every), rel=2e-3)


def test_where_failures_are_rare_the_interval_is_youngs():
    one = Failures(mtbf=1000 * DAY, restart=0.0, save=1.0)
    assert one.interval(1) == pytest.approx((2 * 1000 * DAY) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("devices", [64, 1024, 4096])
def test_the_share_is_that_of_a_simulated_machine(devices, rng):
    one = Failures(mtbf=100 * DAY, restart=120.0, save=40.0)
    interval, segments, spent = one.interval(devices), 20_000, 0.0
    failures = iter(rng.exponential(one.between(devices), 10**6))
    for _ in range(segments):
        needed = interval + one.save
        while (lasts := next(failures)) < needed:
            spent += lasts
            needed = one.restart + interval + one.save
        spent += needed
    assert segments * interval / spent == pytest.approx(one.goodput(devices), rel=0.02)


def test_a_larger_machine_trains_a_smaller_share_more_often_saved():
    one = Failures(mtbf=2000 * DAY, restart=600.0, save=30.0)
    sizes = [64, 1024, 16_384, 10**6, 10**9]
    shares, intervals = [one.goodput(n) for n in sizes], [one.interval(n) for n in sizes]
    assert shares == sorted(shares, reverse=True)
    assert intervals == sorted(intervals, reverse=True)
    assert shares[0] > 0.98
    assert shares[-1] < 1e-6


def test_a_checkpoint_takes_as_long_as_its_state_to_the_host_unless_it_is_said():
    assert Failures().of_state(7.0).stall == 7.0
    assert Failures().of_state(0.01).stall == LEAST_SAVE
    assert Failures(save=30.0).of_state(7.0).stall == 30.0
    assert Failures().of_state(7.0).goodput(4096) == Failures(save=7.0).goodput(4096)
