"""What is said when a run starts."""

import sys
from dataclasses import replace

from axon.config import dump
from axon.launch import host
from axon.precision import Precision
from axon.run.build import program
from axon.run.start_record import dtype_notices, script_notices
from models.llama import Llama


def test_a_class_of_the_script_itself_is_said_when_training_starts(tiny, monkeypatch):
    mine = type("Mine", (Llama,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
    model = tiny.model
    own = mine(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    (line,) = script_notices(dump(replace(tiny, model=own)))
    assert "Mine: defined in the script" in line
    assert not script_notices(dump(tiny))


def test_a_cpu_that_multiplies_bfloat16_says_so_to_a_run_in_float32(tiny, few, tmp_path, monkeypatch):
    said = {}
    for flags in ("avx512f amx_bf16 amx_tile", "avx512f avx512_bf16"):
        monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
        host._CPUINFO.write_text(f"flags\t: fpu {flags}\n")
        for compute in ("float32", "bfloat16"):
            with few(1):
                said[flags, compute] = dtype_notices(program(replace(tiny, precision=Precision(compute))))
    (line,), *others = said.values()
    assert "Precision.compute = 'bfloat16'" in line
    assert others == [[], [], []]
