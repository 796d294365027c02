"""What `axon compile` takes, writes and refuses."""

import json
from dataclasses import replace

import pytest

from axon.config import dump
from axon.errors import UserError
from axon.layout import LayoutError
from axon.show.compile import compile_config, show_report


@pytest.fixture
def config(tiny, tmp_path):
    path = tmp_path / "tiny.gin"
    path.write_text(dump(replace(tiny)))
    return path


def test_a_run_is_compiled_for_a_topology_and_its_program_written(config, tmp_path, capsys):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    text = tmp_path / "step.hlo"
    report = compile_config(config, "v5e:2x2", ["Layout.zero=3"], None, text)
    assert text.read_text().startswith("HloModule")
    told = json.loads(json.dumps(report.json()))
    assert (told["target"], told["devices"], told["mesh"]) == ("v5e:2x2", 4, {"data": 4})
    assert {"kind", "mesh_axes", "count", "bytes", "sent", "asynchronous"} == set(told["collectives"][0])
    show_report(report)
    out = capsys.readouterr().out
    assert "all-gather" in out
    assert "temporaries" in out
    assert "attention: xla, causal & same document (not tpu: " in out  # rows of 32 tokens


def test_a_chip_that_does_not_exist_is_answered_with_one_that_does(config):
    with pytest.raises(UserError, match="Did you mean 'v5e'"):
        compile_config(config, "v5ee:4x4", [], None, None)


def test_a_layout_for_other_chips_is_refused_before_anything_is_compiled(config):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    with pytest.raises(LayoutError, match="= 8 devices, and there are 4"):
        compile_config(config, "v5e:2x2", ["Layout.mesh={'data': 8}"], None, None)
