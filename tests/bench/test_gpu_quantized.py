"""The check of our Hopper kernel of the quantised product: it says what does not run here, and counts what does."""

import jax
import pytest

from scripts.bench.gpu_quantized import PAIRS, Problem, error, problems, speeds, table


@pytest.fixture
def device():
    return jax.devices()[0]


def small(name, dtype="int8"):
    return Problem(name, PAIRS[name], dtype, (64, 256, 128))


def test_where_there_is_no_such_gpu_it_says_so(device):
    found = speeds(device, [small("a tensor")], ("mosaic",))
    assert "this program is for a cpu" in table({"errors": {}, "speeds": found})
    assert len({str(one) for one in problems()}) == len(problems())


def test_an_error_is_that_of_rounding_the_result_and_a_speed_is_of_operations_in_a_second(device):
    found = {str(one): error(one, device, "xla") for one in (small("in blocks"), small("a tensor", "float8_e4m3fn"))}
    assert all(one["within"] and one["error"] > 1e-4 for one in found.values())
    timed = speeds(device, [small("a tensor")], ("xla", "bfloat16"), rounds=3)
    assert all(0 < one["tflops"] < 10 for each in timed.values() for one in each.values())
    assert table({"errors": found, "speeds": timed}).count("ok") == 2
