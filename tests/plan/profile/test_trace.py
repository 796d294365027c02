"""Reading a trace's planes: of GPUs, of TPUs and of a host beside them."""

from collections import Counter
from types import SimpleNamespace

import pytest

from axon.plan.profile import trace
from axon.plan.profile.trace import Event


def event(name, begin, **stats):
    return SimpleNamespace(name=name, start_ns=begin, duration_ns=2.0, stats=list(stats.items()))


def line(name, *events):
    return SimpleNamespace(name=name, events=events)


def plane(name, *lines):
    return SimpleNamespace(name=name, lines=lines)


HOST = plane("/host:CPU", line("python", event("waiting for batches", 1.0), event("Thunk", 1.0, hlo_op="dot.1")))
GPU = plane(
    "/device:GPU:1",
    line("Stream #7(Compute)", event("nvjet_tst", 3.0, hlo_op="dot.1", hlo_module="jit_f"), event("MemcpyH2D", 6.0)),
    line("XLA Ops", event("dot.1", 3.0, hlo_op="dot.1", hlo_module="jit_f")),
)
TPU = plane(
    "/device:TPU:0",
    line("XLA Modules", event("jit_f(123)", 3.0)),
    line("XLA Ops", event("%dot.1 = f32[2]{0} dot(%a, %b)", 3.0), event("copy.2", 9.0)),
    line("Async XLA Ops", event("all-gather-start.3", 4.0)),
)


@pytest.mark.parametrize(
    ("planes", "events"),
    [
        ((HOST, GPU), [Event(1, "dot.1", "nvjet_tst", "jit_f", 3, 5), Event(1, "", "MemcpyH2D", "", 6, 8)]),
        (
            (TPU, HOST),
            [
                Event(0, "dot.1", "%dot.1 = f32[2]{0} dot(%a, %b)", "jit_f", 3, 5),
                Event(0, "copy.2", "copy.2", "", 9, 11),
                Event(0, "all-gather-start.3", "all-gather-start.3", "jit_f", 4, 6),
            ],
        ),
        ((HOST,), [Event(0, "dot.1", "Thunk", "", 1, 3)]),
    ],
)
def test_each_operation_is_read_once_from_where_it_ran(planes, events, tmp_path, monkeypatch):
    (tmp_path / "vm.xplane.pb").write_bytes(b"")
    data = SimpleNamespace(from_file=lambda _: SimpleNamespace(planes=planes))
    monkeypatch.setattr(trace, "ProfileData", data)
    found = trace.read_trace(tmp_path)
    assert found.events == events
    assert found.host == pytest.approx(Counter({"waiting for batches": 2e-9}))
