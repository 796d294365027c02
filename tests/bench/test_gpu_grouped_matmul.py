"""The check of our Hopper grouped matmul: it says what does not run here, and measures what does."""

import jax
import pytest

from scripts.bench.gpu_grouped_matmul import Problem, check, error, table

TINY = Problem(40, 16, 24, 3, "float16", empty=5)


@pytest.fixture
def device():
    return jax.devices()[0]


def test_where_there_is_no_such_gpu_ours_says_so_and_the_rest_is_measured(device):
    found = check(device, [TINY], {"tiny": (64, 32, 32, 4)}, rounds=2)
    assert table(found).count("this program is for a cpu") == 2
    rivals = {name: one for name, one in found["speeds"]["tiny"].items() if name != "mosaic"}
    assert set(rivals) == {"ragged_dot", "dense"}
    assert all(0 < one[part] < 10 for one in rivals.values() for part in ("forward", "both"))


def test_another_implementation_is_within_and_its_second_run_has_the_same_bits(device):
    found = error(TINY, device, kernel="xla")
    assert found["within"]
    assert found["same"]
    assert 0 < found["error"] < 1e-3
