"""`Lobby`, where processes that others have started join this one, and `join`, by which they do."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from axon.errors import Unavailable, UserError
from axon.foreign_json import COUNT, TEXT, read_field, read_json
from axon.launch.worker import Joined, command, how_ended, python_path

ALL = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine, which others reach by its name."""

PAUSE = 0.5
"""Seconds between two looks for a lobby."""


class Lobby:
    """Accepts processes that join over the network, and know the key that is in `file`, which its owner alone may read.

    Args:
        address: HOST:PORT, as others reach this machine; port 0 is any that is free. file: written at first, deleted at
            the end.
    """

    def __init__(self, address: str, file: Path):
        host, port = parsed_address(address)
        try:
            self._server = socket.create_server((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {address}: {error}; give an address of this machine, as HOST:PORT"
            ) from None
        self._key, self._file, self._waiting = secrets.token_bytes(32), file, SimpleQueue[tuple[Connection, str]]()
        reached, port = socket.gethostname() if host in ALL else host, self._server.getsockname()[1]
        self.address = f"{reached}:{port}"
        _write(file, {"host": reached, "port": port, "key": self._key.hex(), "path": python_path()})
        Thread(target=self._accept, daemon=True).start()

    def next(self, make: Callable[[], Any], limit: float) -> Joined:
        """The next process that joins, with an object that `make` returns there. Raises `Unavailable` after `limit`
        seconds."""
        try:
            connection, name = self._waiting.get(timeout=limit)
        except Empty:
            raise Unavailable(f"no process has joined {self.address} for {limit:g} seconds, by {self._file}") from None
        return Joined(connection, make, name)

    def close(self) -> None:
        """Let no further process join; those that wait are sent away."""
        self._file.unlink(missing_ok=True)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()[0].close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, (name, *_) = self._server.accept()
            except OSError:
                return
            Thread(target=self._admit, args=(Connection(accepted.detach()), name), daemon=True).start()

    def _admit(self, connection: Connection, name: str) -> None:
        """In a thread of its own, so that one that says nothing keeps no other waiting."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            self._waiting.put((connection, name))


def join(file: Path, report: Callable[[str], None]) -> None:
    """Serve the `Lobby` that writes `file`, by one process after another, until that deletes it at its end."""
    report(f"waiting for {file}")
    while not file.exists():
        time.sleep(PAUSE)
    while file.exists():
        lobby = _read(file)
        try:
            connection = Client((lobby["host"], lobby["port"]), authkey=bytes.fromhex(lobby["key"]))
        except (OSError, EOFError, AuthenticationError):  # of a process that has died, until another writes it anew
            time.sleep(PAUSE)
            continue
        report(f"joined {lobby['host']}:{lobby['port']}")
        with connection:
            process = _served(connection, lobby["path"])
        if file.exists():
            report(f"left: its process {how_ended(process)}")
            time.sleep(PAUSE)
    report(f"{file} is gone: the run has ended")


def _served(connection: Connection, path: str) -> int:
    """The exit code of the process that serves by a connection; it ends with this one, however that ends. path: folders
    in which modules of whoever asks are looked for, after those of this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((python_path(), path))}
    end, held = os.pipe()
    files = connection.fileno(), end
    process = subprocess.Popen(
        command(*files), env=environment, process_group=0, pass_fds=files, stdin=subprocess.DEVNULL
    )
    os.close(end)
    connection.close()
    try:
        return process.wait()
    finally:
        os.close(held)
        process.wait()


def parsed_address(address: str) -> tuple[str, int]:
    """Host and port. Raises `UserError` for what is no HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"{address!r} is no address: must be HOST:PORT, as '10.0.0.1:7000', port 0 for any that is free"
        )
    return host, int(port)


def _write(file: Path, lobby: Mapping[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        json.dump(lobby, written)
    part.replace(file)


def _read(file: Path) -> dict[str, Any]:
    content = read_json(file)
    return {name: read_field(str(file), content, name, kind) for name, kind in FIELDS.items()}


FIELDS = {"host": TEXT, "port": COUNT, "key": TEXT, "path": TEXT}
