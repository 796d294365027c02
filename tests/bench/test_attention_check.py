"""The check of an accelerator's attention: right attention passes, and a mask that is off by one key does not."""

import jax
import pytest

from axon.kernels import attention
from axon.kernels.attention import Causal, Window
from scripts.bench import attention as check
from scripts.bench.attention import TOLERANCE, attention_lines, check_attention, problems


@pytest.mark.full
def test_right_attention_is_within_the_tolerance(seed):
    found = check_attention(jax.devices("cpu")[0], small=True, seed=seed)
    assert len(found) == 4
    assert all(one["within"] and 0 < one["error"] < TOLERANCE for one in found.values())
    assert all(one["chosen"].startswith("xla") for one in found.values())


@pytest.mark.few(wrong=(Causal() & Window(99),))
@pytest.mark.parametrize("wrong", [Causal() & Window(99), Window(100)], ids=str)
def test_a_wrong_mask_is_found(wrong, monkeypatch, seed):
    """A window that is a key too short, or no causal mask."""
    right, run = Causal() & Window(100), attention._run

    def replaced(chosen, q, k, v, config, inputs):
        config = attention.AttentionConfig(wrong if config.mask == right else config.mask, config.scale)
        return run(chosen, q, k, v, config, inputs)

    monkeypatch.setattr(attention, "_run", replaced)
    monkeypatch.setattr(check, "problems", lambda: problems()[1:3])
    found = check_attention(jax.devices("cpu")[0], small=True, seed=seed)
    assert [one["within"] for one in found.values()] == [True, False]
    (line,) = [line for line in attention_lines("attention", found) if "TOO FAR" in line]
    assert line.startswith(str(right))


def test_every_problem_has_a_name_of_its_own():
    assert len({str(one) for one in problems()}) == len(problems()) > 20
