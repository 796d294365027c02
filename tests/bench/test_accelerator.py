"""The check for accelerators works without one, and on a machine with little more than JAX."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts.bench.accelerator import SMALL, elsewhere, table
from scripts.bench.numerics import difference, first_step
from scripts.bench.speed import largest

ROOT = Path(__file__).parents[2]
NOT_THERE = ("gin", "grain", "matplotlib", "typer", "tokenizers", "datasets", "torch")
ROOMS_THAT_NEED_MORE = ("axon.data", "axon.checkpoint", "axon.config", "axon.run", "axon.cli")


def asleep(options):
    time.sleep(600)


def failing(options):
    raise ValueError("no such thing")


def sound(options):
    return {"limit": options.limit}


def check(folder, *arguments):
    """The script in a process where importing what only the other rooms need fails."""
    blocker = f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE + ROOMS_THAT_NEED_MORE!r}))\n"
    (folder / "sitecustomize.py").write_text(blocker)
    environment = os.environ | {"PYTHONPATH": str(folder), "XLA_FLAGS": ""}
    command = [sys.executable, ROOT / "scripts/accelerator_check", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_it_needs_nothing_but_jax_flax_optax_and_einops_to_begin(tmp_path):
    done = check(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "--platform" in done.stdout


@pytest.mark.few(missing=("GPU or TPU",))
@pytest.mark.parametrize(("asked", "missing"), [((), "GPU or TPU"), (("--platform", "gpu"), "GPU")])
def test_without_an_accelerator_it_says_so_and_offers_tiny_models(tmp_path, asked, missing):
    done = check(tmp_path, *asked)
    assert done.returncode == 2, done.stderr
    assert f"finds no {missing} on this machine" in done.stderr
    assert "--small" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.slow
def test_it_runs_on_a_cpu_with_nothing_but_jax_flax_optax_and_einops(tmp_path):
    done = check(tmp_path, "--platform", "cpu", "--small", "--rounds", "2", "--json", str(tmp_path / "made.json"))
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["platform"] == "cpu"
    assert made["numerics"]["float32"]["loss"] == 0  # the CPU against itself
    assert 0 < made["numerics"]["bfloat16"]["parameter_grad_norm"] < made["numerics"]["bfloat16"]["tolerance"]
    for one in made["speed"].values():
        assert one["tokens_per_second"] > 0
        assert one["mfu"] > 0
    assert made["torch"] == {"unfinished": "torch is not installed"}
    for name in ("numerics", "attention", "speed", "torch"):
        assert table(name, made[name]) in done.stdout


@pytest.mark.full
def test_a_part_that_does_not_end_in_time_or_fails_is_told():
    assert elsewhere(asleep, Namespace(limit=0.5)) == "not finished in 0.5 s (--limit)"
    assert elsewhere(failing, Namespace(limit=60)) == "ValueError: no such thing"
    assert elsewhere(sound, Namespace(limit=60)) == {"limit": 60}


@pytest.mark.full
def test_a_wrong_gradient_is_found_and_named(seed):
    step = first_step(SMALL, 2, 32, jax.devices()[0], "float32", seed)
    path = np.random.default_rng(seed).choice(list(step.norms))
    wrong = replace(step, norms=step.norms | {path: step.norms[path] * 1.01 + 1e-4 * step.grad_norm})
    assert difference(step, step)["parameter_grad_norm"] == 0
    assert difference(wrong, step)["worst_parameter"] == path
    assert difference(wrong, step)["parameter_grad_norm"] > 1e-3


def test_the_first_batch_that_fits_is_taken_and_other_errors_are_not_swallowed():
    def attempt(batch):
        if batch > 4:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"batch": batch}

    def fits(error):
        return "RESOURCE_EXHAUSTED" in str(error)

    assert largest((16, 8, 4, 2), attempt, fits) == {"batch": 4}
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        largest((16, 8), attempt, fits)

    def broken(batch):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        largest((16, 8), broken, fits)
