"""The check of our Hopper attention: it finds what is wrong, says what does not run here, and prints both."""

import jax
import pytest

from axon.bench import gpu_attention
from axon.bench.gpu_attention import FAST, RIGHT, Problem, check_ours, speed_of_both, table
from axon.kernels.attention import Causal

SMALL = Problem(Causal(), (16, 16), sizes=(1, 32, 4, 2))


@pytest.fixture
def device():
    return jax.devices()[0]


def test_where_there_is_no_such_gpu_each_says_so(device):
    errors, speeds = check_ours(device, RIGHT[:2]), speed_of_both(device, FAST[:1], ("mosaic",))
    found = [*errors.values(), *(one for each in speeds.values() for one in each.values())]
    assert all("this program is for a cpu" in one["unavailable"] for one in found)
    assert table(errors, speeds).count("this program is for a cpu") == len(found) == 3


def test_a_right_attention_is_within_and_a_wrong_one_is_not(device, monkeypatch):
    (right,) = check_ours(device, [SMALL], "xla").values()
    assert right["within"]
    wrong = lambda q, k, v, config, inputs: gpu_attention.attention_reference(q, k, v * 1.02, config, inputs)  # noqa: E731
    monkeypatch.setattr(gpu_attention, "attention_and_lse", wrong)
    errors = check_ours(device, [SMALL], "xla")
    assert not next(iter(errors.values()))["within"]
    assert "TOO FAR" in table(errors, {})


def test_speeds_are_floating_point_operations_by_the_formula_in_a_second(device):
    speeds = speed_of_both(device, [SMALL], ("xla", "reference"), rounds=3)
    (each,) = speeds.values()
    assert set(each) == {"xla", "reference"}
    assert all(0 < one[part] < 10 for one in each.values() for part in ("forward", "both"))
    assert table({}, speeds).count("causal, 32 × 16") == 2
