"""What `axon plan --scale` prints, draws and refuses."""

import json
from dataclasses import replace

import pytest

from axon.config import dump
from axon.errors import UserError
from axon.plan.predict.failures import Failures
from axon.show.question import Question
from axon.show.scaling import print_scaling, scale_config, scaling_json
from axon.show.scaling_picture import draw_scaling

FAILURES = Failures(mtbf=1e8, restart=600.0, save=30.0)


@pytest.fixture
def config(tiny, tmp_path):
    path = tmp_path / "tiny.gin"
    path.write_text(dump(replace(tiny)))
    return path


def test_scaling_is_a_table_json_and_a_picture(config, tmp_path, capsys):
    lines = []
    question = Question(config, "h100:2x2", ("Data.batch=16",), ("Layout.zero=1",))
    found = scale_config(question, "2..16", FAILURES, lines.append)
    told = json.loads(json.dumps(scaling_json(found, config)))
    assert [one["devices"] for one in told["weak"]] == [2, 4, 8, 16]
    assert [one["batch"] for one in told["weak"]] == [8, 16, 32, 64]
    assert {one["batch"] for one in told["strong"]} == {16}
    assert told["weak"][0]["efficiency"] == 1
    assert {one["plan"]["layout"]["zero"] for one in told["weak"]} == {1}
    assert len(lines) == 7
    print_scaling(found, "tiny")
    out = capsys.readouterr().out
    assert all(part in out for part in ("weak scaling", "strong scaling", "goodput", "h100:8x2", "predicted"))
    draw_scaling(found, "tiny", tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sizes", ["64", "16..8", "0..8", "a..b", "8..99999999"])
def test_sizes_that_are_none_are_refused_by_the_options_name(config, sizes):
    with pytest.raises(UserError, match=r"--scale .*64\.\.16384"):
        scale_config(Question(config, "h100:2x2"), sizes, FAILURES, print)


def test_a_size_that_no_such_machine_has_is_refused(config):
    with pytest.raises(UserError, match=r"3 devices.*v5p:4x4x4"):
        scale_config(Question(config, "v5p:4x4x4"), "3..12", FAILURES, print)
