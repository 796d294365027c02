"""docs/serving.md: its Python runs as it stands, on a run of its name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import axon.run
from axon.serve import Answer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.full
def test_the_python_example_runs(tiny, caches, monkeypatch, tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    axon.run.run(replace(tiny, run_dir="runs/quickstart", evaluation=None), steps=1, report=str)
    names = {}
    exec(compile(example, "serving.md", "exec"), names)
    assert isinstance(names["answer"], Answer)
    assert 0 < len(names["answer"].ids) <= 50
    assert names["engine"].stats().generated_tokens > 2
    assert capsys.readouterr().out
