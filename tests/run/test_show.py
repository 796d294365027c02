"""What `axon show` prints."""

import re
from dataclasses import replace

import pytest

from axon.config import dump
from axon.layout import LayoutError
from axon.run.show import show_config


@pytest.fixture
def shown(tiny, tmp_path, capsys):
    """shown(*overrides): what is printed of the tiny run's configuration."""

    def of(*overrides):
        (tmp_path / "tiny.gin").write_text(dump(replace(tiny)))
        show_config(tmp_path / "tiny.gin", overrides)
        return capsys.readouterr().out

    return of


def numbers(line):
    return [int(found.replace(",", "")) for found in re.findall(r"\b\d[\d,]*\b", line)]


def test_every_value_has_the_place_where_it_was_written(shown):
    out = shown("Llama.layers=3")
    assert re.search(r"Llama\.layers = 3 +# --set\n", out)
    assert re.search(r"Llama\.embed = 32 +# .*tiny\.gin:\d+\n", out)


def test_the_mesh_needs_no_devices_and_says_what_each_axis_splits(shown):
    out = shown("Layout.mesh={'data': 4, 'tensor': 4}", "Layout.zero=3", "Data.batch=16")
    assert "mesh of 16 devices" in out
    assert re.search(r"data +4 +batch +batch embed", out)
    assert re.search(r"tensor +4 +heads kv_heads mlp vocab", out)


def test_every_parameter_has_a_row_and_the_totals_are_their_sums(shown, tiny):
    out = shown("Layout.mesh={'data': 4, 'tensor': 2}", "Layout.zero=1")
    paths = list(tiny.program.parameters)
    table = {line.split()[0]: line for line in out.splitlines() if line.split() and line.split()[0] in paths}
    assert set(table) == set(paths)
    assert re.search(r"head +embed vocab +32 × 320 +– tensor +20,480", table["head"])
    held = sum(numbers(line)[-1] for line in table.values())
    params = next(line for line in out.splitlines() if line.split()[:1] == ["params"])
    assert numbers(params)[-1] == held
    whole = numbers(params)[-2]
    optimizer = next(line for line in out.splitlines() if line.split()[:1] == ["optimizer"])
    assert numbers(optimizer)[-2] == 2 * whole
    assert numbers(optimizer)[-1] < 2 * held


def test_what_is_replicated_is_told(shown):
    assert "held whole by every device: layers/block/attention_norm/scale" in shown("Layout.mesh={'tensor': 4}")
    split = shown("Layout.mesh={'data': 4}", "Layout.zero=3")
    assert "no parameter is held whole by every device" in split


def test_a_layout_that_cannot_hold_the_model_is_refused_as_a_run_would(shown):
    with pytest.raises(
        LayoutError, match=r"axis 'heads' of size 4 is not divisible by 3.*: layers/block/attention/query"
    ):
        shown("Layout.mesh={'tensor': 3}")
