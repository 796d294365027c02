"""MFU: the formula, the table of peaks, and the measured one."""

from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from axon.observe.mfu import FORMULA, Peak, device_peak, measured_matmul_peak, mfu, peak


def device(kind: str, **more) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform="gpu", process_index=0, **more)


def test_mfu_is_achieved_over_peak():
    assert mfu(1000.0, 2e9, Peak(8e12, "")) == pytest.approx(0.25)
    assert mfu(1000.0, 2e9, Peak(None, "")) is None


def test_a_known_chip_has_its_peak_and_says_where_it_is_from():
    found = peak([device("NVIDIA H200")] * 8)
    assert found.flops == pytest.approx(8 * 989.4e12)
    assert found.source == "8 × 989.4 TFLOP/s, dense bf16, NVIDIA H200"


def test_a_device_that_is_one_core_of_a_chip_has_its_share():
    assert device_peak(device("TPU v5", num_cores=2)) == 459e12
    assert device_peak(device("TPU v4", num_cores=1)) == 137.5e12
    assert device_peak(device("TPU7x", num_cores=1)) == 1153.5e12


def test_an_unknown_chip_is_said_and_not_guessed():
    found = peak([device("TPU v99")])
    assert found.flops is None
    assert "unknown for 'TPU v99'" in found.source


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_table_knows_the_names_that_jax_gives_to_tpus(name, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    chips = len({tuple(d.coords) for d in devices})
    total = sum(device_peak(d) or 0 for d in devices)
    assert total / chips in (275e12, 197e12, 459e12, 918e12, 2307e12)


@pytest.mark.parametrize(("one", "eight"), [(1, 8), (1, 3), (2, 20)])
def test_devices_that_share_cores_have_the_peak_of_one_or_of_all_together_whichever_is_more(one, eight, monkeypatch):
    """By a clock that only products move: each by so many milliseconds, of one device and of eight at once."""
    now = 0.0

    def wait(products):
        nonlocal now
        now += (one if len(products) == 1 else eight) / 1000

    monkeypatch.setattr(jax, "block_until_ready", wait)
    monkeypatch.setattr("axon.observe.mfu.time", SimpleNamespace(perf_counter=lambda: now))
    found = measured_matmul_peak.__wrapped__(8, size=16, seconds=0.5)
    assert found == pytest.approx(2 * 16**3 * 1000 * max(1 / one, 8 / eight))
    assert now < 0.6
    once = measured_matmul_peak.__wrapped__(8, size=16, seconds=0.0)  # on a machine too busy for a second product
    assert once == pytest.approx(found)


def test_the_cpu_is_measured_once_and_in_the_dtype_of_the_run():
    found = peak(jax.devices()[:1]).flops
    assert found is not None
    assert 1e9 < found < 1e14
    assert peak(jax.devices()[:1]).flops == found
    narrow = peak(jax.devices()[:1], "bfloat16")
    assert narrow.source.startswith("bfloat16 matmul measured on this CPU")
    assert narrow.flops != peak(jax.devices()[:1]).flops


def test_the_formula_can_be_printed():
    assert "causal attention, counted once" in FORMULA
    assert "\n" not in FORMULA
