"""What a fault is: the limits are those of the steps before, the same again after a restart."""

import json

import numpy as np
import pytest

from axon.errors import UserError
from axon.train.faults import Faults, Monitor, Spikes


def judged(monitor: Monitor, losses, first: int = 1):
    """The kind of fault of each step, or None."""
    found = [monitor.judge(step, {"loss": loss, "grad_norm": 1.0}) for step, loss in enumerate(losses, first)]
    return [fault.kind if fault else None for fault in found]


def test_a_spike_is_above_the_mean_by_so_many_deviations_of_the_window(rng):
    losses = rng.normal(3.0, 0.1, 50)
    monitor = Monitor(Faults(spikes=Spikes(loss=4.0, window=20)))
    kinds = judged(monitor, losses)
    assert kinds[:21] == [None] * 21  # nothing is, before there is a window
    seen = losses[-21:-1] if kinds[-22:].count("spike") == 0 else None
    if seen is not None:
        limit = monitor.limits(51)["loss"]
        assert limit == pytest.approx(seen.mean() + 4 * seen.std(), rel=1e-6)
        assert judged(monitor, [float(limit) * 0.999, float(limit) * 1.5], 51) == [None, "spike"]


def test_faulty_steps_do_not_enter_the_window():
    monitor = Monitor(Faults("skip", Spikes(window=3)))
    assert judged(monitor, [1.0, 1.1, 0.9, 1.0, 9.0, np.nan, 9.0, 1.0]) == [
        *[None] * 4,
        "spike",
        "not_finite",
        "spike",
        None,
    ]


def test_what_a_checkpoint_keeps_gives_the_same_limits(rng):
    faults = Faults("skip", Spikes(window=5, grad_norm=3.0))
    monitor = Monitor(faults, left_out=(4, 9))
    judged(monitor, rng.normal(3, 1, 9))
    monitor.skip()
    again = Monitor.restored(faults, json.loads(json.dumps(monitor.saved())))
    assert again == monitor
    assert again.limits(10) == monitor.limits(10)
    assert Monitor(faults).saved() == {}


def test_skips_are_bounded_in_all_and_in_a_row():
    monitor = Monitor(Faults("skip", skips=3, skips_in_a_row=2))
    assert [monitor.skip(), monitor.skip()] == [True, True]
    judged(monitor, [1.0])
    assert [monitor.skip(), monitor.skip()] == [True, False]
    monitor = Monitor(Faults("skip", skips_in_a_row=1))
    assert [monitor.skip(), monitor.skip()] == [True, False]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Faults("skipp"), r"Faults\.not_finite is 'skipp'; must be one of stop, skip, rollback\. Did you mean"),
        (lambda: Spikes(policy="no"), r"Spikes\.policy is 'no'"),
        (lambda: Spikes(loss=None), r"Spikes\.loss and Spikes\.grad_norm are None.* Faults\.spikes to None"),
        (lambda: Spikes(window=1), r"Spikes\.window is 1"),
        (lambda: Faults(hang_seconds=0), r"Faults\.hang_seconds is 0"),
        (lambda: Faults(hang_seconds=1e-6), r"Faults\.hang_seconds is 1e-06; must be at least 1, or None"),
        (lambda: Faults(hang_seconds_besides=0.5), r"Faults\.hang_seconds_besides is 0\.5; must be at least 1"),
        (lambda: Faults(replay_every=0), r"Faults\.replay_every is 0"),
    ],
)
def test_mistakes_are_said(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()
