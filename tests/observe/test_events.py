"""The events of a run: on disk as they happen, whole after a kill, and the last of them says how it ended."""

import json
from pathlib import Path

import pytest

from axon.errors import UserError
from axon.launch.signals import Interrupted
from axon.observe.events import FileEvents, events, record_event
from axon.observe.lines import read_lines


def test_an_event_is_on_disk_with_time_step_and_kind_as_soon_as_it_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.25)
    with events(tmp_path / "events.jsonl") as journal:
        journal.record("save_end", 7, seconds=0.5)
        assert read_lines(tmp_path / "events.jsonl") == [
            {"time": 1000.25, "step": 7, "kind": "save_end", "seconds": 0.5}
        ]
        journal.record("save_end", 9)
        journal.record("stop")
        assert (journal.last("save_end") or {})["step"] == 9
        assert journal.last("hang") is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "done"),
        (Interrupted(15), "interrupted"),
        (UserError("no\nmore"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_last_event_says_how_it_ended(tmp_path, error, outcome):
    path = tmp_path / "events.jsonl"
    FileEvents(path).__exit__(type(error), error, None)
    (end,) = read_lines(path)
    assert (end["kind"], end["outcome"]) == ("end", outcome)
    assert (end.get("error") == "UserError: no") == isinstance(error, UserError)


def test_a_torn_event_of_a_killed_process_is_dropped_by_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    record_event(path, "start")
    with path.open("a") as file:
        file.write(json.dumps({"time": 1, "kind": "save_end"})[:-9])
    record_event(path, "restart", 5, code=-9)
    assert [event["kind"] for event in read_lines(path)] == ["start", "restart"]


def test_a_full_disk_is_an_error_and_does_not_hide_another(tmp_path, monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        journal = FileEvents(tmp_path / "events.jsonl")
        monkeypatch.setattr(journal._file, "_file", full)
        with pytest.raises(UserError, match="No space left"):
            journal.record("start")
        journal.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


def test_processes_but_the_first_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with events(Path("/nowhere/events.jsonl")) as journal:
        journal.record("start")
        assert not isinstance(journal, FileEvents)
        assert journal.last("start") is None
