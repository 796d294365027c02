"""Actors of a Ray cluster that serve a lobby: one that dies is there again, and none is left."""

import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from axon.errors import UserError
from axon.launch.lobby import Lobby
from axon.launch.ray_actors import RayActors, missing

LIMIT = 120


@pytest.fixture
def cluster(monkeypatch):
    """Ray begins one of this machine; it sends nothing about its use."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


class Process:
    """Tells which it is, and of whom, beside what it was begun with."""

    def __init__(self, begun_with: int):
        self.begun_with = begun_with

    def ids(self):
        return self.begun_with, os.getpid(), os.getppid()


def wait_until(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.extra
def test_each_serves_one_that_dies_is_there_again_and_none_is_left(cluster, tmp_path, rng):
    handler, lines, file = signal.getsignal(signal.SIGTERM), [], tmp_path / "lobby.json"
    numbers = rng.integers(100, size=3).tolist()
    with closing(RayActors(file, 2, {"CPU": 0.5}, lines.append)), closing(Lobby("127.0.0.1:0", file)) as lobby:
        assert signal.getsignal(signal.SIGTERM) is handler
        one, other = (lobby.next(partial(Process, number), LIMIT) for number in numbers[:2])
        first, second = (process.call("ids", limit=LIMIT) for process in (one, other))
        assert [first[0], second[0]] == numbers[:2]
        assert first[1] != second[1]
        os.kill(first[2], signal.SIGKILL)  # the actor, with which what it has started ends
        wait_until(lambda: not one.alive)
        again = lobby.next(partial(Process, numbers[2]), LIMIT)
        third = again.call("ids", limit=LIMIT)
        assert third[0] == numbers[2]
        assert second == other.call("ids", limit=LIMIT)
        for process in (other, again):
            process.close()
    assert lines == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for _, *pids in (second, third) for pid in pids))


def test_resources_that_a_cluster_lacks_are_told():
    (line,) = missing({"CPU": 4.0, "GPU": 5.0, "node": 1.0}, 2, {"CPU": 2, "GPU": 3})
    assert line == "Samplers.ray asks for 2 times 3 GPU, and the Ray cluster has 5: what is missing is waited for"
    assert missing({}, 1, {"rack": 1})[0].startswith("Samplers.ray asks for 1 times 1 rack, and the Ray cluster has 0")


@pytest.mark.extra
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:head"])
def test_a_cluster_that_is_not_there_is_told(address, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=rf"Samplers\.ray: RAY_ADDRESS is {address}, where no Ray cluster answers"):
        RayActors(tmp_path / "lobby.json", 1, {}, print)
