"""The check of our Hopper paged attention: it says what does not run here, and counts what does."""

import jax
import pytest

from axon.errors import UserError
from scripts.bench.attention import TOLERANCE
from scripts.bench.gpu_paged import DECODES, Problem, copy_speed, error, problems, speeds, table


@pytest.fixture
def device():
    return jax.devices()[0]


def test_where_there_is_no_such_gpu_it_says_so(device):
    tiny = Problem("decode", ((1, 40),), heads=(2, 1, 16))
    with pytest.raises(UserError, match="'mosaic' is unavailable for paged_attention: this program is for a cpu"):
        error(tiny, device)
    found = {"errors": {}, "speeds": speeds(device, [tiny], ("mosaic",)), "copy": 1.0}
    assert "this program is for a cpu" in table(found)


@pytest.mark.full
def test_errors_and_speeds_are_of_the_implementation_that_is_named(device, seed):
    tiny = Problem("mixed", ((1, 40), (5, 9)), "int8", heads=(2, 1, 16), window=7, extra=("sinks", "alibi_slopes"))
    found = error(tiny, device, "xla", seed)
    assert found["chosen"].startswith("xla, int8 pages of 64, window 7")
    assert 0 < found["error"] < TOLERANCE
    (each,) = speeds(device, [Problem("decode", ((1, 40),), heads=(2, 1, 16))], ("xla",), rounds=3).values()
    assert 0 < each["xla"]["gb_s"] < 100
    assert 0 < copy_speed(device, 2**16, rounds=3) < 1000


def test_every_problem_has_a_name_of_its_own():
    found = [*problems(), *DECODES]
    assert len({str(one) for one in found}) == len(found) > 20
