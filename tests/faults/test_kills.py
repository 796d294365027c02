"""A run that is killed at random moments, again and again, while checkpoints are being written."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from axon.observe.lines import read_lines

EVERY = 9
CONFIG = (
    (Path(__file__).parents[1] / "tiny.gin").read_text()
    + f"""
Train.steps = STEPS
Checkpoints.every = {EVERY}
"""
)


def losses(folder: Path):
    records = [record for record in read_lines(folder / "metrics.jsonl") if "loss" in record]
    return [(record["step"], record["loss"], record["grad_norm"], record["tokens"]) for record in records]


def killed(folder: Path, config: Path, kills: int, seed: int, environ) -> list[dict]:
    command = [
        sys.executable,
        str(Path(__file__).parent / "killed.py"),
        str(config),
        str(folder),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60 + 30 * kills)
    log = folder.with_suffix(".log")
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("kills", "steps"),
    [pytest.param(10, 150, marks=pytest.mark.full), pytest.param(100, 900, marks=pytest.mark.slow)],
)
def test_a_run_killed_at_random_moments_loses_no_checkpoint_and_no_bit(caches, tmp_path, seed, kills, steps):
    config = tmp_path / "tiny.gin"
    config.write_text(CONFIG.replace("STEPS", str(steps)))
    mine = {"JAX_COMPILATION_CACHE_DIR": str(caches / "processes"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environ = os.environ | mine | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    killed(tmp_path / "whole", config, 0, seed, environ)
    starts = killed(tmp_path / "cut", config, kills, seed, environ)
    assert [start["code"] for start in starts] == [None] * kills + [0]
    for before, after in pairwise(starts):
        assert after["from"] == before["latest"]
        # One interval, and the one whose save was in progress: the next save waits for it.
        assert before["latest"] >= before["reached"] - 2 * EVERY
    events = read_lines(tmp_path / "cut" / "events.jsonl")
    complete = 0
    for event in events:
        if event["kind"] == "save_end":
            complete = event["step"]
        if event["kind"] == "resume":
            assert event["step"] >= complete  # what was said to be saved is
            assert event["lost_steps"] <= 2 * EVERY
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
