"""docs/own_loop.md: its blocks, in their order, are a script that runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from axon.run.folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text()
SMALLER = {
    "vocab=8192, embed=256, layers=4": "vocab=320, embed=16, layers=1",
    "heads=4, kv_heads=4, mlp=704": "heads=8, kv_heads=8, mlp=16",
    "Data(seq=256, batch=8)": "Data(seq=32, batch=8, sources=SOURCES, tokenizer=TOKENIZER, held_out=0.2)",
    "steps=240": "steps=4",
    "warmup=30": "warmup=1",
    "step % 60": "step % 2",
}


@pytest.mark.full
def test_the_script_of_the_page_runs(text, caches, monkeypatch, tmp_path, capsys):
    from axon.data import Bpe, Folder

    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    for whole, smaller in SMALLER.items():
        assert whole in script
        script = script.replace(whole, smaller)
    monkeypatch.chdir(tmp_path)
    names = {"SOURCES": (Folder(str(text)),), "TOKENIZER": Bpe(vocab=320)}
    exec(compile(script, "own_loop.md", "exec"), names)
    assert "continues after step 4 and 1024 tokens" in capsys.readouterr().out
    assert names["ours"].shape == (1, len(names["ids"]), 320)
    np.testing.assert_allclose(names["ours"], names["saved"], atol=1e-5)
    assert RunFolder.existing("runs/mine").tree().steps == 4
