"""Processes that sample a run's answers: the same batches as without, however one of them ends."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from worlds import Fatal, Held

from axon.data import FeedContext
from axon.errors import UserError
from axon.layout import Layout
from axon.observe.metrics import read_metrics
from axon.run import program
from axon.serve import Sampling
from axon.train.policy_gradient import GRPO
from axon.tune import Rollouts, Samplers, samplers

SAMPLING = Sampling(tokens=6, temperature=1.0, stop_ids=tuple(range(0, 320, 3)))


@pytest.fixture(scope="module")
def playing(tiny, prompts, caches):
    """A run that learns from episodes; its processes find what was compiled."""
    data = Rollouts(replace(tiny.data, seq=48), environment=Fatal(), prompts=(prompts,), samples=4, sampling=SAMPLING)
    run = replace(tiny, data=data, layout=Layout({"data": 1}), objective=GRPO(), steps=4, evaluation=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield run


@pytest.fixture(scope="module")
def made(playing, few):
    with few(1):
        return program(playing)


def drawn(made, data, states, folder=None):
    """Batches with their metrics, one for each state, and the lines that were reported."""
    lines = []
    context = FeedContext(7, made.runtime, objective=GRPO(), report=lines.append, folder=folder)
    with data.prepare(lambda line: None).feed(context) as feed:
        return [(feed.draw(state), dict(feed.metrics)) for state in states], lines


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_sample_what_this_one_would_also_where_one_is_killed(processes, made, playing, begun, rng, tmp_path):
    """By the weights of each step, in the midst of their episodes; nothing of them is left at the end."""
    states = [replace(begun(made, rng), step=np.int32(step)) for step in (3, 4)]
    expected, _ = drawn(made, playing.data, states)
    environment, own = Fatal(file=str(tmp_path / "died")), Samplers(processes=processes)
    data = replace(playing.data, environment=environment, samplers=own)
    found, (line,) = drawn(made, data, states, tmp_path)
    for (batch, metrics), (other, others) in zip(found, expected, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
        assert metrics == others
    assert any(not np.array_equal(found[0][0][name], found[1][0][name]) for name in ("targets", "logprobs"))
    for part in ("sampler ", "was killed by SIGKILL", f"its {8 // processes} answers are sampled again"):
        assert part in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["died"]


@pytest.mark.slow
def test_a_run_one_step_off_is_the_same_by_other_processes_and_continues_bit_for_bit(playing, do, tmp_path):
    playing = replace(playing, data=replace(playing.data, staleness=1))
    whole = do(playing, tmp_path / "whole")
    other = replace(playing, data=replace(playing.data, samplers=Samplers()))
    do(other, tmp_path / "stopped", steps=2)
    ran = do(other, tmp_path / "stopped")
    names = ("loss", "grad_norm", "policy", "reward", "rollout_turns", "rollout_staleness")
    assert ran.records(*names) == whole.records(*names)
    assert not (ran.folder / "weights").exists()


@pytest.mark.slow
def test_answers_that_kill_every_process_end_the_run(made, playing, begun, rng, tmp_path):
    environment = Fatal(file=str(tmp_path / "died"), once=False)
    with pytest.raises(UserError, match=r"sampler 0: .*SIGKILL: so did the 2 before it, with the same 8 answers"):
        drawn(made, replace(playing.data, environment=environment, samplers=Samplers()), [begun(made, rng)])
    assert samplers.ATTEMPTS == 3


# ---- processes that join ---------------------------------------------------------------------------------------------


@contextmanager
def joining(folder, count):
    """So many of `axon sample`, and the files of what they say."""
    logs = [folder.with_name(f"sampler{number}.log") for number in range(count)]
    command = [sys.executable, "-u", "-m", "axon", "sample", str(folder)]
    started = [subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT) for log in logs]
    try:
        yield started, logs
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.extra
def test_processes_of_ray_sample_what_the_run_would(made, playing, begun, rng, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    states = [replace(begun(made, rng), step=np.int32(step)) for step in (3, 4)]
    own = Samplers(processes=2, address="127.0.0.1:0", ray={"CPU": 0.5}, limit=120)
    (expected, _), (found, lines) = (
        drawn(made, data, states, tmp_path) for data in (playing.data, replace(playing.data, samplers=own))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert lines == []


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of Ray whose head has no room for actors, beside two nodes that have."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 8}
    head = {"num_cpus": 0, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def remove_node_of(held, cluster):
    """Kills the node of Ray on which runs what holds a process of an actor, once it does."""
    while not (held.exists() and held.read_text().endswith("\n")):
        time.sleep(0.05)
    pid = int(held.read_text())
    for _ in range(2):  # the actor that has started it, and the node that has started the actor
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    (node,) = (one for one in cluster.list_all_nodes() if one.all_processes["raylet"][0].process.pid == pid)
    assert node is not cluster.head_node
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_a_node_of_ray_that_is_gone_costs_no_answer(cluster, made, playing, begun, rng, tmp_path):
    """In the midst of an episode; its actor is started anew on another node."""
    states = [replace(begun(made, rng), step=np.int32(step)) for step in (3, 4)]
    expected, _ = drawn(made, playing.data, states)
    held, own = tmp_path / "held", Samplers(address="127.0.0.1:0", ray={"CPU": 1}, limit=120)
    data = replace(playing.data, environment=Held(file=str(held)), samplers=own, limit=120.0)
    with ThreadPoolExecutor(1) as thread:
        removed = thread.submit(remove_node_of, held, cluster)
        found, (line,) = drawn(made, data, states, tmp_path)
        removed.result(0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert "the process on 127.0.0.1 has left; its 8 answers are sampled again" in line


@pytest.mark.full
def test_processes_that_join_sample_what_the_run_would_also_where_one_is_killed(made, playing, begun, rng, tmp_path):
    """They are there before the run; one dies in its episodes, and comes again; at the end of the run they end."""
    states = [replace(begun(made, rng), step=np.int32(step)) for step in (3, 4)]
    expected, _ = drawn(made, playing.data, states)
    environment, own = Fatal(file=str(tmp_path / "died")), Samplers(processes=2, address="127.0.0.1:0", limit=120)
    data, folder = replace(playing.data, environment=environment, samplers=own), tmp_path / "run"
    folder.mkdir()
    with joining(folder, 2) as (started, logs):
        found, lines = drawn(made, data, states, folder)
        assert [process.wait(30) for process in started] == [0, 0]
    for (batch, metrics), (other, others) in zip(found, expected, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
        assert metrics == others
    assert any("the process on 127.0.0.1 has left; its 4 answers are sampled again" in line for line in lines), lines
    said = [log.read_text() for log in logs]
    assert all("joined 127.0.0.1:" in one and "the run has ended" in one for one in said), said
    assert any("was killed by SIGKILL" in one for one in said)
    assert list(folder.iterdir()) == []


def test_devices_that_samplers_cannot_have_are_told_with_the_remedy(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"Samplers\.devices has 1 entries, and Samplers\.processes is 2"):
        Samplers(processes=2, devices=("1",))
    with pytest.raises(UserError, match=r"Samplers\.ray is set, and Samplers\.address is not.*0\.0\.0\.0:0"):
        Samplers(ray={"GPU": 1})
    with pytest.raises(UserError, match=r"Samplers\.ray is \{'GPU': -1\}"):
        Samplers(ray={"GPU": -1}, address="0.0.0.0:0")
    with pytest.raises(UserError, match=r"the GPUs 0,1: start it with CUDA_VISIBLE_DEVICES.*Samplers\.devices"):
        Samplers().check("gpu")
    with pytest.raises(UserError, match=r"on tpus.*leave it out"):
        Samplers().check("tpu")
    Samplers(devices=("1",)).check("gpu")
    assert Samplers(processes=2, devices=("2,3", "4")).environ(0) == {"CUDA_VISIBLE_DEVICES": "2,3"}


JOINED = """
include 'run.gin'
Rollouts.layout = @serving/Layout()
serving/Layout.mesh = {'data': 1}
Rollouts.samplers = @Samplers()
Samplers.address = '127.0.0.1:0'
"""


@pytest.mark.slow
def test_a_run_of_two_processes_learns_what_one_does_from_a_process_that_joins(command, tmp_path):
    """One step off: the first process asks the other one's answers, too. Where none joins in time, both end."""
    (tmp_path / "joined.gin").write_text(JOINED)
    (tmp_path / "waits.gin").write_text("include 'joined.gin'\nSamplers.limit = 2.0\n")
    assert command(2, "run.gin", "--run-dir", "one").returncode == 0
    alone = command(1, "waits.gin", "--run-dir", "two", "--processes", "2")
    assert alone.returncode == 2
    assert re.search(r"no process has joined .* for 2 seconds", alone.stdout + alone.stderr)
    with joining(tmp_path / "two", 1) as ((sampler,), _):
        done = command(1, "joined.gin", "--run-dir", "two", "--processes", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert sampler.wait(30) == 0
    names = ("step", "loss", "grad_norm", "reward", "reward_std", "rollout_staleness")
    rows = {run: read_metrics(tmp_path / run / "metrics.jsonl") for run in ("one", "two")}
    one, two = ([[row[name] for name in names] for row in rows[run]] for run in rows)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    assert len(one) == 3
