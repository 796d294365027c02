"""Versions, commit and hardware of a run, for `run.json`: what its numbers depend on besides the configuration; and
the memory that it uses."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

_DISTRIBUTIONS = {
    "axon": "axon-jax",  # `axon` alone is another project's on the public registry
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
}


def run_record(command: Sequence[str] | None = None, folder: str | Path = ".") -> dict[str, Any]:
    """Versions, the git commit of `folder`, hardware, command (this process's if None) and the time, UTC.

    Asks JAX for its devices, so it starts JAX's backend.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv if command is None else command),
        "versions": versions(),
        "git": git_state(folder),
        "hardware": hardware(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a run's numbers depend on; None for one that is not installed."""
    found = {name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()}
    return {"python": platform.python_version()} | found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: str | Path = ".") -> dict[str, Any] | None:
    """The commit checked out in `folder`, and whether tracked files differ from it; None outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: str | Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a repository on a disk that does not answer
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """Kind and count of the devices of all hosts, and this host's CPU, its cores, and its memory in bytes."""
    return {
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "processes": jax.process_count(),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


_STATUS = Path("/proc/self/status")


def memory_use() -> dict[str, int]:
    """Bytes: `host` and `host_peak` of this process; `device`, `device_peak` and `device_limit` where the device has
    memory of its own and says."""
    return _of_host() | _of_device(jax.local_devices()[0])


def _of_host() -> dict[str, int]:
    if not _STATUS.is_file():
        return {}
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    found = {"host": lines.get("VmRSS"), "host_peak": lines.get("VmHWM")}
    return {name: 1024 * int(text.split()[0]) for name, text in found.items() if text}


def _of_device(device: Any) -> dict[str, int]:
    stats = device.memory_stats() or {}
    names = {"device": "bytes_in_use", "device_peak": "peak_bytes_in_use", "device_limit": "bytes_limit"}
    return {ours: stats[theirs] for ours, theirs in names.items() if theirs in stats}
