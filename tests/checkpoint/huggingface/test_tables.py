"""Tables of a person's own models are found like those of `models`."""

import sys
from importlib.metadata import EntryPoint

import pytest

from axon.checkpoint.huggingface import tables
from axon.config import load
from axon.errors import UserError

OWN = """
from dataclasses import replace

from models import llama

class Own(llama.Llama):
    \"\"\"A model of one's own.\"\"\"

HUGGING_FACE = (replace(llama.HUGGING_FACE[0], name="%s"),)
"""


@pytest.mark.parametrize("way", ["imported by a config file", "an entry point"])
def test_a_model_of_ones_own_brings_its_table(way, tmp_path, monkeypatch, request):
    name, module = f"Own{way[3]}ForCausalLM", f"own_model_{len(way)}"
    (tmp_path / f"{module}.py").write_text(OWN % name)
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop(module, None))
    with pytest.raises(UserError, match="A model of your own brings its table: HUGGING_FACE in its module"):
        tables.table_of({"architectures": [name]})
    if way == "an entry point":
        point = EntryPoint("own", module, tables.ENTRY_POINTS)
        monkeypatch.setattr(tables, "entry_points", lambda group: [point] if group == point.group else [])
        for read in (tables._installed, tables._declared):
            read.cache_clear()
            request.addfinalizer(read.cache_clear)
    else:
        (tmp_path / "own.gin").write_text(f"from {module} import Own\nOwn.vocab = 8\n")
        with pytest.raises(UserError):
            load(tmp_path / "own.gin", root="Own")  # what it lacks is another matter
    assert tables.table_of({"architectures": [name]}).name == name
