"""The check of our Hopper attention: it says what does not run here, and counts what does."""

import jax
import pytest

from axon.kernels.attention import Causal
from scripts.bench.attention import check_attention
from scripts.bench.gpu_attention import SHAPES, Shape, speeds, table


@pytest.fixture
def device():
    return jax.devices()[0]


def test_where_there_is_no_such_gpu_each_says_so(device):
    found = {"errors": check_attention(device, small=True, kernel="mosaic"), "speeds": speeds(device, SHAPES[:1])}
    (both,) = found["speeds"].values()
    assert all("this program is for a cpu" in one["unavailable"] for one in (*found["errors"].values(), *both.values()))
    assert table(found).count("this program is for a cpu") == len(found["errors"]) + 2


def test_speeds_are_floating_point_operations_by_the_formula_in_a_second(device):
    found = speeds(device, [Shape(Causal(), (16, 16), (1, 32, 4, 2))], ("xla", "reference"), rounds=3)
    (each,) = found.values()
    assert set(each) == {"xla", "reference"}
    assert all(0 < one[part] < 10 for one in each.values() for part in ("forward", "both"))
    assert table({"errors": {}, "speeds": found}).count("causal, 32 × 16") == 2
