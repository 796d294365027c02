"""README.md: its rooms are those there are, and its Python example runs."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMALLER = {
    "vocab=8192": "vocab=320",
    "embed=256, layers=4, heads=4, kv_heads=4, mlp=704": "embed=16, layers=1, heads=2, kv_heads=2, mlp=16",
    "Data(seq=256, batch=8)": "Data(seq=32, batch=8, sources=SOURCES, tokenizer=TOKENIZER, held_out=0.2)",
    "warmup=30, steps=240": "warmup=1, steps=2",
    "    steps=240": "    steps=2",
}


def test_every_room_is_in_the_table_of_rooms():
    rooms = {p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("axon/*/"), ROOT / "models"] if any(p.glob("*.py"))}
    table = README[README.index("| room |") :].split("\n\n")[0]
    assert {room.removesuffix("/") for room in re.findall(r"`((?:axon|models)/\S*)`", table)} - {
        "axon/cli.py",
        "axon/errors.py",
    } == rooms


@pytest.mark.full
def test_the_python_example_runs(text, caches, monkeypatch, tmp_path):
    from axon.data import Bpe, Folder

    (example,) = re.findall(r"```python\n(from .*?)```", README, re.DOTALL)
    for whole, smaller in SMALLER.items():
        assert whole in example
        example = example.replace(whole, smaller)
    monkeypatch.chdir(tmp_path)
    names = {"SOURCES": (Folder(str(text)),), "TOKENIZER": Bpe(vocab=320)}
    exec(compile(example, "README.md", "exec"), names)
    assert int(names["state"].step) == 2
    assert jax.numpy.isfinite(names["metrics"]["loss"])
    assert (tmp_path / "runs" / "mine" / "loss.png").is_file()
