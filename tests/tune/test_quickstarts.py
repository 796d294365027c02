"""What quickstarts that tune say that they reach, by their command, with three seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon.observe.lines import read_lines

ROOT = Path(__file__).parents[2]
MINUTES = 30


@pytest.fixture
def tuned(tmp_path):
    """tuned(name, **bindings): the evaluations of a quickstart that is carried out with these, by step."""

    def run(name, **bindings):
        folder = tmp_path / f"run{len([*tmp_path.iterdir()])}"
        line = [sys.executable, "-m", "axon", "tune", f"configs/tune/quickstart_{name}.gin", "--run-dir", str(folder)]
        line += [word for field, value in bindings.items() for word in ("--set", f"{field.replace('_', '.')}={value}")]
        own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(line, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60 * MINUTES)
        assert done.returncode == 0, done.stdout + done.stderr
        return {one["step"]: one for one in read_lines(folder / "metrics.jsonl") if "eval_loss" in one}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_taught_student_ends_lower_than_itself_alone_in_twice_the_steps(number, tuned):
    taught = tuned("distil", Train_seed=number)
    steps = max(taught)
    single = {"Train_stages": "{}", "Train_references": "{}", "Train_objective": "@NextToken()"}
    alone = tuned("distil", Train_seed=number, STEPS=2 * steps, **single)
    assert max(alone) == 2 * steps
    assert taught[steps]["eval_loss"] <= 1.05 * min(one["eval_loss"] for one in alone.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_preferences_raise_the_rate_of_preferred_answers(number, tuned):
    evaluations = tuned("dpo", Train_seed=number)
    before, after = evaluations[0], evaluations[max(evaluations)]
    assert after["eval_accuracy"] >= 0.9
    assert after["eval_exact"] >= before["eval_exact"] + 0.1
