"""What is said when a run starts."""

import sys
from dataclasses import replace

from axon.config import dump
from axon.run.start_record import script_notices
from models.llama import Llama


def test_a_class_of_the_script_itself_is_said_when_training_starts(tiny, monkeypatch):
    mine = type("Mine", (Llama,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
    model = tiny.model
    own = mine(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    (line,) = script_notices(dump(replace(tiny, model=own)))
    assert "Mine: defined in the script" in line
    assert not script_notices(dump(tiny))
