"""Servers on real sockets, in threads, each with an engine of its own."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from fake import FakeEngine, served

from axon.serve.http.limits import Limits
from axon.serve.http.model import Served
from axon.serve.http.serve import Server, bound, listen, url_of
from axon.serve.http.service import Service


@dataclass
class Running:
    """A server that runs: `lines` is its access log."""

    server: Server
    service: Service
    url: str
    client: httpx.Client
    lines: list[str] = field(default_factory=list)

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json={"model": "tiny", **body})

    def complete(self, prompt, **body) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def events(self, path: str, **body) -> list[dict]:
        """Of a stream, which has to end as it should."""
        answer = self.post(path, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def until(self, holds, seconds: float = 10) -> None:
        """Wait until `holds()`."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never was so"
            time.sleep(0.005)


@contextmanager
def serving(model: Served, limits: Limits = Limits()):
    lines: list[str] = []
    with bound("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a slow reader is soon seen
        url = url_of(listener)
        listen(listener)
        service = Service(model, limits)
        server = Server(service, url, lines.append)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        with httpx.Client(base_url=url, timeout=20) as client:
            running = Running(server, service, url, client, lines)
            running.until(lambda: lines)
            yield running
            server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared():
    """A server that the tests of a file share, and leave as it was."""
    with serving(served()) as running:
        yield running


@pytest.fixture
def serve():
    """serve(engine, **limits): a server with a fresh engine, `engine.seconds` and so on; a context manager."""

    def start(engine: FakeEngine | None = None, limits: Limits = Limits(), **given):
        return serving(served(engine, **given), limits)

    return start
