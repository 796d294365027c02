"""Serving until told to stop."""

import logging
import time
from collections.abc import Callable
from functools import partial
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo
from socket import socket as Socket
from types import FrameType

import uvicorn

from axon.errors import UserError
from axon.serve.http.app import app
from axon.serve.http.limits import Limits
from axon.serve.http.model import Served
from axon.serve.http.service import Service

BACKLOG = 2048
JOIN = 10.0
"""Seconds for the step that runs at the end: an interpreter that ends during one may crash."""


def serve(
    model: Served,
    socket: Socket,
    limits: Limits = Limits(),
    report: Callable[[str], None] = partial(print, flush=True),
) -> bool:
    """Serve a model until SIGTERM or SIGINT; whether every request that was taken was answered.

    From the signal on, new requests are refused (503) and those that run end as they would, within
    `limits.drain_seconds`; a second signal breaks them off. `report` is given the URL once it is served, then a line of
    JSON for each request. `socket`: of `bound`. Raises `UserError` if it cannot listen there.
    """
    service = Service(model, limits)
    server = Server(service, url_of(socket), report)
    listen(socket)
    server.run(sockets=[socket])
    service.worker.join(JOIN)
    return not server.broken_off


def bound(host: str = "127.0.0.1", port: int = 8000) -> Socket:
    """A socket at this address, which does not listen yet: who connects is refused, and does not wait. A port of 0 is
    any that is free. Raises `UserError` where there is no such address, or somebody listens there."""
    try:
        family, kind, *_ = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)[0]
        socket = Socket(family, kind)
        try:
            socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            socket.bind((host, port))
        except OSError:
            socket.close()
            raise
        return socket
    except UnicodeError as error:
        raise UserError(f"--host is {host[:80]!r}; expected the name or the address of a host") from error
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "another --port, or 0 for any that is free, may do" if isinstance(error, OSError) else "0 to 65535"
        raise UserError(f"Cannot listen on {host}:{port}: {reason}; {hint}") from error


def listen(socket: Socket) -> None:
    """Take connections from now on. Raises `UserError` if another process does, at the same address."""
    try:
        socket.listen(BACKLOG)
    except OSError as error:
        raise UserError(f"Cannot listen on {url_of(socket)}: {error.strerror}; another --port may do") from error


def url_of(socket: Socket) -> str:
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn's, with another way to end.

    Attributes:
        broken_off: whether requests that ran were not waited for.
    """

    def __init__(self, service: Service, url: str, report: Callable[[str], None]):
        self._worker, self._limits, self._url, self._report = service.worker, service.limits, url, report
        self._ends: float | None = None
        self.broken_off = False
        config = uvicorn.Config(
            app(service, report),
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    async def startup(self, sockets: list[Socket] | None = None) -> None:
        await super().startup(sockets)
        self._report(f"serving {self._url}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, or, while draining, break off."""
        now = time.monotonic()
        self._ends = now + self._limits.drain_seconds if self._ends is None else now
        self._worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to close."""
        if self._ends is not None:
            late = time.monotonic() >= self._ends
            self.broken_off = late and self._worker.busy
            self.should_exit = late or not self._worker.busy
            if self.should_exit:
                self._worker.stop()
        return await super().on_tick(counter)
