"""Runs so small that they train in seconds, to do harm to."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

import axon.run
from axon.observe.lines import read_lines
from axon.run import Train

sys.path.append(str(Path(__file__).parent))  # a configuration names classes of poison.py


@dataclass(frozen=True)
class Ran:
    """A run that was done: its tree, its folder and the lines it said."""

    train: Train
    folder: Path
    lines: list[str]

    def records(self, *names: str) -> list[list[Any]]:
        """Of each training step: step and the named numbers."""
        found = read_lines(self.folder / "metrics.jsonl")
        return [[record[name] for name in ("step", *names)] for record in found if "loss" in record]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Its events of these kinds, in order."""
        return [event for event in read_lines(self.folder / "events.jsonl") if event["kind"] in kinds]


@contextmanager
def only(count: int) -> Iterator[None]:
    """Within, JAX has but the first `count` devices."""
    devices = jax.devices()[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        patch.setattr(jax, "device_count", lambda *_: count)
        yield


@pytest.fixture(scope="session")
def few() -> Callable[[int], Any]:
    """few(n): a context in which JAX has but the first n devices."""
    return only


@pytest.fixture(scope="session")
def do(caches) -> Callable[..., Ran]:
    """do(train, folder, devices=1, **arguments of run): train in `folder` on the first so many devices."""

    def run(train: Train, folder: Path, devices: int = 1, **arguments: Any) -> Ran:
        lines: list[str] = []
        train = replace(train, run_dir=str(folder))
        with only(devices):
            axon.run.run(train, report=lines.append, **arguments)
        return Ran(train, folder, lines)

    return run


@pytest.fixture(scope="session")
def short(tiny) -> Train:
    """Twelve steps with a checkpoint every fifth, without evaluation."""
    return replace(tiny, evaluation=None)


@pytest.fixture(scope="session")
def whole(short, do, tmp_path_factory) -> Ran:
    """The short run, never disturbed. To be looked at only: see `copied`."""
    return do(short, tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of the whole run's folder, to do harm to."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copy"))


TINY = Path(__file__).parents[1] / "tiny.gin"


@pytest.fixture(scope="module")
def start(caches, tmp_path_factory) -> Iterator[Callable[..., subprocess.Popen]]:
    """start(folder, *options, lines="", devices=1) begins `axon train` of tiny.gin and these lines of configuration, in
    a session of its own; it is gone when the module is."""
    begun: list[subprocess.Popen] = []
    cached = {"JAX_COMPILATION_CACHE_DIR": str(caches / "processes"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def begin(folder: Path, *options: str, lines: str = "", devices: int = 1) -> subprocess.Popen:
        config = tmp_path_factory.mktemp("config") / "tiny.gin"
        config.write_text(TINY.read_text() + lines)
        command = [sys.executable, "-c", "from axon.cli import main; main()", "train", str(config)]
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        paths = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        own = {"XLA_FLAGS": flags, "PYTHONPATH": paths, "COLUMNS": "200"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        command += ["--run-dir", str(folder), *options]
        begun.append(subprocess.Popen(command, env=os.environ | cached | own, **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="session")
def wait_for_step() -> Callable[[int, Path, subprocess.Popen], None]:
    """wait_for_step(step, folder, process): return once the run has logged that step."""

    def wait(step: int, folder: Path, process: subprocess.Popen) -> None:
        until = time.monotonic() + 200
        while max((r["step"] for r in read_lines(folder / "metrics.jsonl") if "loss" in r), default=0) < step:
            assert time.monotonic() < until
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)

    return wait
