"""Schedules that a person writes."""

from pathlib import Path

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    Costs,
    DualPipeV,
    FromFile,
    GPipe,
    Interleaved,
    OneFOneB,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    figures,
)
from axon.parallel.pipeline.text import parse, write

MINE = """\
# Two stages, by hand.
stages 2
microbatches 2

F0  .
F1  F0
.   B0     # as early as it can
B0  F1
.   B1
B1  .
"""


@pytest.fixture
def file(tmp_path):
    def make(text: str) -> str:
        path = tmp_path / "mine.txt"
        path.write_text(text)
        return str(path)

    return make


@pytest.mark.parametrize(
    "schedule",
    [GPipe(), OneFOneB(), Interleaved(3), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV(), TwoBW()],
    ids=str,
)
def test_every_schedule_can_be_written_and_read_again(schedule, rng):
    table = schedule.table(int(rng.integers(1, 5)), int(rng.integers(5, 13)))
    again = parse(write(table), "mine.txt")
    for name in ("action", "microbatch", "chunk"):
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
    assert (again.microbatches, again.chunks, again.flush) == (table.microbatches, table.chunks, table.flush)


def test_a_file_is_a_schedule(file):
    schedule = FromFile(file(MINE))
    table = schedule.table(2, 2)
    assert schedule.virtual == 1
    assert [str(work) for work in table.orders()[1]] == ["F0", "B0", "F1", "B1"]
    assert figures(table, Costs()).time == 9


def test_the_docstrings_schedule_is_right():
    text = (FromFile.__doc__ or "").split("\n\n", 1)[1]
    assert parse(text[: text.index("A line is a tick")], "docstring").ticks == 6


def test_a_file_is_for_its_own_numbers(file):
    schedule = FromFile(file(MINE))
    with pytest.raises(UserError, match=r"mine\.txt .*2 stages.*'pipe' is 4\. Set that to 2"):
        schedule.table(4, 2)
    with pytest.raises(
        UserError,
        match=r"mine\.txt .*Layout\.microbatches is 8\. Set that to 2, or",
    ):
        schedule.table(2, 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("B0  F1\n", "B0\n", r"mine\.txt:8: a tick has a cell for each of 2 stages; this line has 1"),
        ("B0  F1", "B0  G1", r"mine\.txt:8: stage 1 has 'G1'; expected F, B, I or W with a number"),
        ("B0  F1", "B0  F1/", r"mine\.txt:8: stage 1 has 'F1/'"),
        ("B0  F1", "B0  F-1", r"mine\.txt:8: stage 1 has 'F-1'"),
        ("stages 2", "stage 2", r"mine\.txt:2: unknown setting 'stage' of a schedule\. Did you mean 'stages'"),
        ("stages 2", "stages two", r"mine\.txt: expected `stages NUMBER`, at least 1, before .*; got 'two'"),
        ("stages 2\n", "", r"mine\.txt: expected `stages NUMBER`.*; there is no such line"),
        ("stages 2", "stages", r"mine\.txt:2: expected `stages VALUE`"),
        ("microbatches 2", "microbatches 0", "expected `microbatches NUMBER`, at least 1"),
        ("microbatches 2", "microbatches 3", r"mine\.txt: stage 0 never does F2: .* \(tick 0 is line 5\)"),
        ("microbatches 2", "microbatches 2\nplacement U", r"mine\.txt: placement is 'U'; must be loop or V"),
        ("microbatches 2", "microbatches 2\nflush never", r"mine\.txt: flush is 'never'; must be yes or no"),
        ("B1  .\n", "B1  .\nvirtual 1\n", r"mine\.txt:11: expected `virtual VALUE`, before the first tick"),
        ("B0  F1", "B1  F1", r"mine\.txt: tick 5, stage 0: B1 repeats what the stage does in tick 3 already"),
        ("F0  .\nF1  F0", "F0  F0\nF1  .", r"mine\.txt: tick 0, stage 1: F0 needs F0 of stage 0, .*tick 0 is line 5"),
        ("B0  F1", "B0/1  F1", r"mine\.txt: tick 3, stage 0: chunk 1 does not exist; must be in \[0, 1\)"),
    ],
)
def test_a_damaged_file_is_refused_with_line_or_tick_and_why(old, new, message, file):
    assert old in MINE
    with pytest.raises(UserError, match=message):
        FromFile(file(MINE.replace(old, new))).table(2, 2)


def test_a_file_without_ticks_or_without_text_is_refused(file, tmp_path):
    with pytest.raises(UserError, match="the schedule has no ticks"):
        FromFile(file("stages 2\nmicrobatches 2\n")).table(2, 2)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read: it is not UTF-8 text"):
        FromFile(str(tmp_path / "binary")).table(2, 2)
    with pytest.raises(UserError, match=r"There is no file or folder .*Did you mean 'mine\.txt'"):
        FromFile(str(Path(tmp_path / "mine.tx"))).table(2, 2)


def test_a_file_has_a_name():
    with pytest.raises(UserError, match=r"FromFile\.path is ''; expected a path"):
        FromFile("")


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(MINE, encoding="utf-8-sig")
    assert FromFile(str(path)).table(2, 2).ticks == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("microbatches 2", "microbatches 2\nstages 2"), r"mine:4: stages is set a second time"),
        (("stages 2", "stages \N{ARABIC-INDIC DIGIT TWO}"), "expected `stages NUMBER`"),
        (("F1  F0", "F\N{ARABIC-INDIC DIGIT ONE}  F0"), "stage 0 has 'F\N{ARABIC-INDIC DIGIT ONE}'; expected F, B"),
    ],
)
def test_a_setting_twice_and_digits_that_are_not_ascii_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        parse(MINE.replace(*change), "mine")
