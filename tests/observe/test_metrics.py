"""The metrics file: what was appended is there, whatever killed the run."""

import errno
import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.observe.metrics import MetricsFile, missing_steps, read_metrics


def test_a_record_is_readable_as_soon_as_it_is_appended(tmp_path, rng):
    loss = float(np.float32(rng.normal()))
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.append({"step": 1, "loss": loss})
    file.append({"step": 1, "eval_loss": 2.5, "note": "first"})
    assert read_metrics(file.path) == [{"step": 1, "loss": loss}, {"step": 1, "eval_loss": 2.5, "note": "first"}]
    file.close()


def test_scalars_of_numpy_and_jax_keep_their_exact_value(tmp_path, rng):
    value = rng.normal(size=4).astype(np.float32)
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.append({"step": np.int64(3), "a": value[0], "b": jnp.asarray(value[1]), "tokens": jnp.int32(7)})
    (record,) = read_metrics(tmp_path / "m.jsonl")
    assert record == {"step": 3, "a": float(value[0]), "b": float(value[1]), "tokens": 7}
    assert np.float32(record["a"]).tobytes() == value[0].tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.float32(jnp.inf)])
def test_a_float_that_json_does_not_know_is_null(tmp_path, value):
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.append({"step": 1, "loss": value})
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert strict == {"step": 1, "loss": None}


def test_a_record_that_a_disk_takes_in_parts_is_whole(tmp_path, monkeypatch):
    with MetricsFile(tmp_path / "m.jsonl") as file:
        monkeypatch.setattr(file, "_file", Slow(file._file))
        file.append({"step": 1, "loss": 2.5})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.5}]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    with MetricsFile(tmp_path / "m.jsonl") as file, Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(file, "_file", Slow(full))
        with pytest.raises(UserError, match=rf"cannot write {file.path}: No space left on device\. Free some space"):
            file.append({"step": 1, "loss": 2.5})


def test_a_line_of_which_a_full_disk_took_a_part_is_taken_back(tmp_path, monkeypatch):
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.append({"step": 1})
        monkeypatch.setattr(file, "_file", Slow(file._file, room=6))
        with pytest.raises(UserError, match="No space left"):
            file.append({"step": 2})
        monkeypatch.undo()
        file.append({"step": 3})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 3}]


class Slow:
    """A file that takes three bytes at a time, and `room` bytes in all."""

    def __init__(self, inner, room=100):
        self.inner, self.close, self.room = inner, inner.close, room

    def write(self, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 3
        return self.inner.write(data[:3])


def test_steps_without_a_record_are_found():
    records = [
        {"step": 1, "loss": 1.0},
        {"step": 3, "loss": 1.0},
        {"step": 4, "eval_loss": 1.0},
        {"note": "x", "loss": 1},
    ]
    assert missing_steps(records, 5) == [2, 4, 5]
    assert missing_steps(records, 1) == missing_steps([], 0) == []


def test_records_after_a_step_are_cut(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.append({"config": "abc"})
        for step in range(1, 8):
            file.append({"step": step, "loss": step / 10})
            if step % 2 == 0:
                file.append({"step": step, "eval_loss": step / 10})
        assert [record["step"] for record in file.cut_back(4)] == [5, 6, 6, 7]
        file.append({"step": 5, "loss": 9.0})
    records = read_metrics(tmp_path / "m.jsonl")
    assert [record.get("step") for record in records] == [None, 1, 2, 2, 3, 4, 4, 5]
    assert records[-1] == {"step": 5, "loss": 9.0}
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_cutting_back_further_than_the_end_changes_nothing(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.append({"step": 1, "loss": 1.0})
        before = file.path.stat()
        assert file.cut_back(100) == []
        assert file.path.stat() == before


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    line = '{"step": 2, "loss": 0.5}\n'
    path.write_text('{"step": 1, "loss": 1.0}\n' + line[:-cut])
    assert [record["step"] for record in read_metrics(path)] == [1]
    with MetricsFile(path) as file:
        file.cut_back(1)
        file.append({"step": 2, "loss": 0.25})
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.25}]


def test_a_spoilt_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"m\.jsonl:2 is not valid JSON"):
        read_metrics(path)
    path.write_text('{"step": 1}\n17\n')
    with pytest.raises(UserError, match=r"m\.jsonl:2 holds 17; must be an object.*Delete that line"):
        read_metrics(path)


def test_a_file_that_is_not_there_has_no_records(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []
