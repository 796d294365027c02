"""Runs so small that they train in seconds, to do harm to."""

import shutil
import sys
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
