"""A workload is five fields, all of them needed."""

import json

import pytest

from axon.errors import UserError
from axon.plan.workload import Workload

FIELDS = {"requests_per_second": 2.5, "prompt_tokens": 100, "answer_tokens": 20, "ttft_ms": 300, "tpot_ms": 40}


def read(folder, **fields):
    path = folder / "traffic.json"
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return Workload.read(path)


def test_a_workload_is_read_and_a_request_has_half_its_answer_on_average(tmp_path):
    found = read(tmp_path, **FIELDS)
    assert (found.requests_per_second, found.tpot_ms, found.context) == (2.5, 40.0, 110.0)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("value", "part"), [(None, "there is no field"), (0, "must be a number"), ("2", "must be")])
def test_a_field_that_is_absent_or_wrong_is_named(tmp_path, name, value, part):
    with pytest.raises(UserError, match=rf"--traffic.*{part}") as raised:
        read(tmp_path, **{**FIELDS, name: value})
    assert name in str(raised.value)


def test_an_unknown_field_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"'ttft'.*Did you mean 'ttft_ms'"):
        read(tmp_path, **FIELDS, ttft=3)
