"""Where the time went: every second of a run is counted once, whatever ended its processes."""

import pytest

from axon.observe.goodput import goodput
from axon.observe.page import Run, page


def event(time, kind, step=None, **values):
    return {"time": float(time), "step": step, "kind": kind, **values}


def steps(first, last, seconds=1.0, **values):
    return [{"step": s, "loss": 5.0 / s, "step_seconds": seconds, **values} for s in range(first, last + 1)]


WHOLE = [
    event(0, "start"),
    event(1, "compile_begin"),
    event(5, "compile_end", seconds=4.0),
    event(15, "steps", 10, first=1, seconds=10.0, data_seconds=2.0, memory={"host": 2**30}),
    event(15.5, "save_blocked", 10, seconds=0.5),
    event(17.5, "evaluation", 10, seconds=2.0),
    event(18, "end", outcome="done"),
]


def test_every_second_of_a_run_is_counted_once():
    found = goodput(WHOLE, steps(1, 10))
    assert found.seconds == pytest.approx(
        {
            "productive": 8,
            "compile": 4,
            "data": 2,
            "evaluation": 2,
            "checkpoint": 0.5,
            "repeated": 0,
            "down": 0,
            "other": 1.5,
        }
    )
    assert sum(found.seconds.values()) == found.total == 18
    assert found.share == pytest.approx(8 / 18)
    assert found.starts == 1


def test_steps_that_a_kill_undid_are_lost_and_the_time_until_the_next_start_is_down():
    # Killed 3 s (3 steps) after step 10, whose save was the last; started again 20 s later.
    events = [*WHOLE[:5], event(38.5, "restart", 10, code=-9, seconds=1), event(38.5, "start")]
    events += [event(39, "resume", 10, lost_steps=3, lost_seconds=3.0), event(49, "steps", 20, data_seconds=0.0)]
    found = goodput([*events, event(50, "end", outcome="done")], steps(1, 20))
    assert found.seconds["repeated"] == 3
    assert found.seconds["down"] == pytest.approx(38.5 - 15.5 - 3)
    assert found.seconds["productive"] == 18
    assert found.starts == 2
    assert found.lost == pytest.approx(23)


def test_skipped_and_rolled_back_steps_are_not_productive():
    records = steps(1, 4) + steps(5, 5, skipped=1) + steps(6, 10)
    found = goodput([*WHOLE[:-1], event(18, "rollback", 5, lost_steps=2, lost_seconds=2.0)], records)
    assert found.seconds["productive"] == 7
    assert found.seconds["repeated"] == 3


def test_time_after_a_process_that_was_done_is_not_counted():
    later = [{**one, "time": one["time"] + 1000} for one in WHOLE]
    found = goodput([*WHOLE, *later], steps(1, 20))
    assert found.total == pytest.approx(36)
    assert found.seconds["down"] == 0
    interrupted = goodput([*WHOLE[:-1], event(18, "end", outcome="interrupted"), *later], steps(1, 20))
    assert interrupted.seconds["down"] == pytest.approx(982)


def test_a_clock_that_was_moved_back_gives_no_negative_time():
    found = goodput([*WHOLE, event(-500, "start"), event(-490, "end")], steps(1, 10))
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.total >= 0


def test_a_run_without_events_has_no_goodput():
    assert goodput([], steps(1, 3)).share == 0


def test_the_page_needs_nothing_from_elsewhere_and_shows_what_happened():
    events = [*WHOLE, event(19, "not_finite", 7, loss=None, policy="skip"), event(19, "hang", 8, phase="<step>")]
    text = page(
        Run("a<b", events, steps(1, 10, tokens_per_second=3.0), "Train.steps = 10", {"loss_unit": "image"}),
        goodput(events, []),
    )
    assert "http" not in text
    assert "<script" not in text
    assert "a&lt;b" in text
    assert "not finite" in text
    assert "&lt;step&gt;" in text
    assert text.count("<svg") == 4  # the bar, loss, tokens per second, memory; no gradient norm is recorded here
    assert "Loss, nats per image" in text
    assert "nothing recorded" in text


def test_a_run_that_has_only_begun_has_a_page():
    text = page(Run("new", [event(0, "start")], [], "", {}), goodput([event(0, "start")], []))
    assert "running, or killed" in text
