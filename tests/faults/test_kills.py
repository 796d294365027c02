"""A run that is killed at random moments, again and again, while checkpoints are being written; of one process and two.

A step that was logged is one after which the save before it had returned. So if saves are asynchronous, a kill loses at
most the save that was begun last, as the one before it was waited for; if not, none.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from axon.checkpoint import Reader
from axon.observe.lines import read_lines
from axon.run import program
from axon.run.folder import RunFolder
from axon.runtime import flattened

EVERY = 9
CONFIG = (
    (Path(__file__).parents[1] / "tiny.gin").read_text()
    + f"""
Train.steps = STEPS
Checkpoints.every = {EVERY}
Checkpoints.asynchronous = ASYNCHRONOUS
Train.layout = @Layout()
Layout.mesh = {{'data': PROCESSES}}
"""
)

REWARDED = """
Train.data = @Rollouts()
Train.objective = @GRPO()
Rollouts.data = @Data()
Rollouts.prompts = (@short/Synthetic(),)
short/Synthetic.length = 3
Rollouts.rewards = {'early': @Matches()}
Matches.pattern = '[ -m].*'
Rollouts.samples = 4
Rollouts.sampling = @Sampling()
Sampling.tokens = 8
Sampling.temperature = 1.0
"""
"""What makes it a run that learns from rewards, whose time is its rollouts'."""

ADAPTED = """
Train.init_from = 'BASE'
Train.transforms = (@Quantize(), @LoRA())
Quantize.format = 'nf4'
LoRA.rank = 4
"""
"""What makes it a run of which adapters alone train, over a base in 4 bits."""


def losses(folder: Path):
    records = [record for record in read_lines(folder / "metrics.jsonl") if "loss" in record]
    return [(record["step"], record["loss"], record["grad_norm"], record["tokens"]) for record in records]


@pytest.fixture(scope="module")
def train(caches, tmp_path_factory):
    """train(kills, processes, steps, seed, asynchronous, more): the folder of a run that was killed so often, and what
    `killed.py` says of each of its starts."""
    own = {"JAX_COMPILATION_CACHE_DIR": str(caches / "processes"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    own["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"

    def run(
        kills: int, processes: int, steps: int, seed: int, asynchronous: bool = True, more: str = ""
    ) -> tuple[Path, list[dict]]:
        where = tmp_path_factory.mktemp("killed")
        folder, config = where / "run", where / "tiny.gin"
        words = {"STEPS": steps, "ASYNCHRONOUS": asynchronous, "PROCESSES": processes}
        text = CONFIG + more
        for word, value in words.items():
            text = text.replace(word, str(value))
        config.write_text(text)
        arguments = [str(one) for one in (config, folder, kills, processes, seed)]
        command = [sys.executable, str(Path(__file__).parent / "killed.py"), *arguments]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600 + 120 * kills)
        log = folder.with_suffix(".log")
        assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
        return folder, [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def whole(train):
    """whole(processes, steps): the losses of a run that was not killed."""
    found = {}

    def run(processes: int, steps: int):
        if (processes, steps) not in found:
            found[processes, steps] = losses(train(0, processes, steps, seed=0)[0])
        return found[processes, steps]

    return run


FULL, SLOW = pytest.mark.full, pytest.mark.slow


@pytest.mark.parametrize(
    ("kills", "steps", "processes", "asynchronous"),
    [
        pytest.param(6, 100, 1, True, marks=FULL),
        pytest.param(4, 100, 1, False, marks=FULL),
        pytest.param(100, 900, 1, True, marks=SLOW),
        pytest.param(100, 900, 1, False, marks=SLOW),
        pytest.param(100, 900, 2, True, marks=SLOW),
    ],
)
def test_a_run_killed_at_random_moments_loses_one_save_at_most_and_no_bit(
    train, whole, seed, kills, steps, processes, asynchronous
):
    folder, starts = train(kills, processes, steps, seed, asynchronous)
    print(*starts, sep="\n")
    assert [start["code"] for start in starts] == [None] * kills + [0]
    in_flight = EVERY if asynchronous else 0
    for before, after in pairwise(starts):
        begun = (before["reached"] - 1) // EVERY * EVERY  # the last step whose save had returned for certain
        assert before["latest"] >= begun - in_flight
        assert after["from"] == before["latest"]
    complete = 0
    for event in read_lines(folder / "events.jsonl"):
        if event["kind"] == "save_end":
            complete = event["step"]
        if event["kind"] == "resume":
            assert event["step"] >= complete  # what was said to be saved is
            assert event["lost_steps"] <= EVERY + in_flight
    assert losses(folder) == whole(processes, steps)


@pytest.mark.full
def test_a_killed_run_keeps_its_adapters_and_continues_bit_for_bit(train, few, seed):
    adapted = ADAPTED.replace("BASE", str(train(0, 1, 9, seed)[0]))
    (folder, starts), (whole, _) = (train(kills, 1, 100, seed, False, adapted) for kills in (4, 0))
    print(*starts, sep="\n")
    assert [start["code"] for start in starts] == [None] * 4 + [0]
    assert losses(folder) == losses(whole)
    with few(1):
        state = program(RunFolder.existing(whole).tree()).abstract_state()
        killed, expected = (
            flattened(Reader(one / "checkpoints").restore_parts({"parameters": state.parameters})["parameters"])
            for one in (folder, whole)
        )
    for path, value in expected.items():
        np.testing.assert_array_equal(killed[path], value, err_msg=path)
    assert all(np.any(value) for path, value in killed.items() if path.endswith(("/a", "/b", "/codes")))


@pytest.mark.full
@pytest.mark.parametrize(("setting", "stale"), [("Rollouts.redraws = 2", 0), ("Rollouts.staleness = 2", 2)])
def test_a_run_killed_in_its_rollouts_continues_bit_for_bit(setting, stale, train, seed):
    """Also with batches that wait, which were sampled before the checkpoint."""
    folder, starts = train(3, 1, 30, seed, more=REWARDED + setting)
    print(*starts, sep="\n")
    assert [start["code"] for start in starts] == [None] * 3 + [0]
    whole, _ = train(0, 1, 30, seed, more=REWARDED + setting)
    assert losses(folder) == losses(whole)
    records = [record for record in read_lines(folder / "metrics.jsonl") if "logprob_gap" in record]
    assert [record["rollout_staleness"] for record in records] == [min(step, stale) for step in range(30)]
    assert (max(record["logprob_gap"] for record in records) <= 1e-5) == (not stale)
