"""Processes that join over the network: who may, and what is told."""

import json
import socket
import stat
import time
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from threading import Thread

import pytest
from test_worker import Counter

from axon.errors import Unavailable, UserError
from axon.launch.lobby import Lobby, join
from axon.launch.worker import WorkerError


@pytest.fixture
def lobby(tmp_path):
    made = Lobby("127.0.0.1:0", tmp_path / "lobby.json")
    yield made
    made.close()


def test_who_knows_the_key_joins_past_one_that_says_nothing_and_one_with_another_key(lobby, tmp_path, rng):
    """And works until the lobby is closed, which ends it."""
    file = tmp_path / "lobby.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = json.loads(file.read_text())
    where = said["host"], said["port"]
    with socket.create_connection(where):
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client(where, authkey=b"another")
        lines = []
        thread = Thread(target=join, args=(file, lines.append), daemon=True)
        thread.start()
        start, more = rng.integers(100, size=2).tolist()
        one = lobby.next(partial(Counter, start), 60)
        assert one.call("add", more, limit=60) == start + more
        with pytest.raises(KeyError):
            one.call("fail", "error", limit=60)
        with pytest.raises(WorkerError, match=r"the process on 127\.0\.0\.1 has left"):
            one.call("fail", "die", limit=60)
        assert not one.alive
        again = lobby.next(partial(Counter, start), 60)
        assert again.alive
        assert again.call("add", 1, limit=60) == start + 1
        lobby.close()
        again.close()
        thread.join(60)
    assert not thread.is_alive()
    expected = f"waiting for {file}", "joined 127.0.0.1:", "left: its process", "joined 127.0.0.1:", f"{file} is gone"
    assert all(line.startswith(begin) for line, begin in zip(lines, expected, strict=True)), lines


def test_where_none_comes_it_is_told(lobby, tmp_path):
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"no process has joined 127\.0\.0\.1:\d+ for 0\.2 seconds.*lobby\.json"):
        lobby.next(Counter, 0.2)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("address", ["7000", ":7000", "host:", "host:70000", "host:-1"])
def test_what_is_no_address_is_told(address, tmp_path):
    with pytest.raises(UserError, match="HOST:PORT"):
        Lobby(address, tmp_path / "lobby.json")


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path):
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:7000"):
        Lobby("192.0.2.1:7000", tmp_path / "lobby.json")
