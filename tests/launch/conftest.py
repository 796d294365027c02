"""Real processes that have met: the smallest that can show what several of them do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def environment(caches) -> Callable[[int], dict[str, str]]:
    """environment(devices): of a process with so many CPU devices, flags as here, caches that tests share, and what
    tests/faults has to import."""
    import os

    mine = {"JAX_COMPILATION_CACHE_DIR": str(caches / "processes"), "COLUMNS": "200", "JAX_PLATFORMS": "cpu"}
    paths = f"{Path(__file__).parents[1] / 'faults'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    mine |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": paths}
    flag = "--xla_force_host_platform_device_count"
    return lambda devices: os.environ | mine | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flag}={devices}"}


@pytest.fixture(scope="session")
def tell(environment, tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """tell(name, …, processes=2): what each of so many, of four devices in all, found out of these: see `member.py`."""

    def told(*names: str, processes: int = 2) -> list[dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp("told")
        command = [sys.executable, str(Path(__file__).parent / "member.py"), str(folder), str(processes), *names]
        own = environment(4 // processes)
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240 * max(1, processes // 2))
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((folder / f"{index}.json").read_text()) for index in range(processes)]

    return told


@pytest.fixture(scope="session")
def told(tell, once) -> list[dict[str, Any]]:
    """What they found out of all that runs by default."""
    return once("told", lambda: tell("agreement", "alike", "rewards", "feed", "training", "damage", "tiers"))
