"""Reports by content: a program is compiled once, another one again, and what is not whole is not believed."""

from dataclasses import asdict

import pytest
from planning import program

from axon.layout import Layout
from axon.plan import report_cache
from axon.plan.report import DoesNotFit, Report, Traffic
from axon.plan.report_cache import ReportCache

LAYOUT = Layout(mesh={"data": 1})


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, by a compiler for which nothing called `small` has room."""
    asked = []

    def compile_lowered(program, target, lowered):
        asked.append(target)
        if target == "small":
            raise DoesNotFit("too large", 3.5)
        traffic = Traffic("all-reduce", ("data", "tensor"), 2, 8, 8.0, 4.0)
        sizes = {"memory": {"total": len(asked)}, "cycles": {}, "kernel_cycles": {}, "kernels": {}}
        numbers = {"model_flops": 1.0, "executed_flops": 1.0, "asynchronous": 0.5, "compile_seconds": 1.0}
        more = {"mesh": {"data": 1}, "collectives": (traffic,), "choices": {}, "options": {}, "uncounted": ("loop",)}
        return Report(target=target, devices=1, **sizes, **numbers, **more), "HloModule"

    monkeypatch.setattr(report_cache, "compile_lowered", compile_lowered)
    return asked


def test_a_program_is_compiled_once_and_reported_the_same(compiled, tmp_path):
    made = [ReportCache(tmp_path / "new").report(program(layers=1), "v5e:1x1") for _ in range(2)]
    assert len(compiled) == 1
    assert made[0] == made[1]
    assert asdict(made[0])["collectives"][0]["mesh_axes"] == ("data", "tensor")


@pytest.mark.few(change=({"batch": 16},))
@pytest.mark.parametrize("change", [{"mlp": 256}, {"batch": 16}, {"layout": LAYOUT, "seq": 256}])
def test_another_program_or_target_is_compiled_again(compiled, tmp_path, change):
    cache = ReportCache(tmp_path)
    for made, target in ((program(), "v5e:1x1"), (program(**change), "v5e:1x1"), (program(), "v5p:1x1x1")):
        cache.report(made, target)
    assert compiled == ["v5e:1x1", "v5e:1x1", "v5p:1x1x1"]


def test_what_does_not_fit_is_known_too(compiled, tmp_path):
    for _ in range(2):
        with pytest.raises(DoesNotFit, match="too large") as raised:
            ReportCache(tmp_path).report(program(layers=1), "small")
        assert raised.value.needed == 3.5
    assert compiled == ["small"]


def test_a_file_that_was_cut_short_is_compiled_again(compiled, tmp_path):
    cache = ReportCache(tmp_path)
    cache.report(program(layers=1), "v5e:1x1")
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text()[:-20])
    assert cache.report(program(layers=1), "v5e:1x1").memory == {"total": 2}
    assert len(compiled) == 2
