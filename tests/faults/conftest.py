"""Runs so small that they train in seconds, to do harm to."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axon.observe.lines import read_lines
from axon.run import Train


@pytest.fixture(scope="session")
def short(tiny) -> Train:
    """Twelve steps with a checkpoint every fifth, without evaluation."""
    return replace(tiny, evaluation=None)


@pytest.fixture(scope="session")
def whole(short, do, tmp_path_factory) -> Any:
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
