"""What a person sees while training."""

import io
import random
import time

import pytest

from axon.observe.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_gets_a_line_at_the_first_and_last_step_and_every_few_seconds():
    out, clock = io.StringIO(), Clock()
    with Progress(20, out, seconds=5, clock=clock) as progress:
        for step in range(1, 21):
            progress.update(step, 9.0 - step / 10, 3456.7, 0.421)
            clock.now += 1
    lines = out.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        "step  1/20",
        "step  6/20",
        "step 11/20",
        "step 16/20",
        "step 20/20",
    ]
    assert lines[1] == "step  6/20  loss 8.4000  3,457 tok/s  MFU 42.1 %  ETA 0:14"
    assert "ETA" not in lines[0]
    assert "\x1b" not in out.getvalue()


def test_the_time_left_follows_the_pace_and_leaves_compilation_out():
    out, clock = io.StringIO(), Clock()
    pace = random.uniform(0.5, 3)
    with Progress(1000, out, seconds=0, clock=clock) as progress:
        clock.now += 500  # compiling
        for step in range(1, 101):
            progress.update(step, 1.0, 1.0)
            clock.now += pace
    assert out.getvalue().splitlines()[-1].endswith(f"ETA {duration(900 * pace)}")


def test_a_resumed_run_goes_on_from_its_step():
    out, clock = io.StringIO(), Clock()
    with Progress(1000, out, seconds=0, clock=clock) as progress:
        for step in (901, 902):
            progress.update(step, 1.0, 1.0)
            clock.now += 1
    assert out.getvalue().splitlines()[-1].endswith("ETA 1:38")


def test_a_terminal_gets_one_live_line_with_what_is_said_above_it():
    out = Terminal()
    with Progress(50, out) as progress:
        for step in range(1, 51):
            progress.update(step, 2.25, 1000.0, 0.5)
            if step == 30:
                progress.print_line("saved [30] checkpoint")
    text = out.getvalue()
    assert "step 50/50" in text
    assert "loss 2.2500  1,000 tok/s  MFU 50.0 %" in text
    assert "saved [30] checkpoint" in text


def test_an_unknown_peak_shows_no_mfu():
    out = io.StringIO()
    with Progress(1, out) as progress:
        progress.update(1, 2.0, 10.0, None)
    assert "MFU" not in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (12345, "3:25:45")])
def test_durations_read_as_a_clock(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_an_update_takes_well_under_a_millisecond_of_a_processor(stream):
    with Progress(10**6, stream()) as progress:
        progress.update(0, 1.0, 1.0, 0.5)
        begun = time.process_time()
        for step in range(1, 501):
            progress.update(step, 1.0, 1.0, 0.5)
        assert (time.process_time() - begun) / 500 < 1e-3
