"""Serving until told to stop."""

import logging
import socket
import time
from collections.abc import Callable
from functools import partial
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
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits = Limits(),
    report: Callable[[str], None] = partial(print, flush=True),
) -> bool:
    """Serve a model until SIGTERM or SIGINT; whether every request that was taken was answered.

    From the signal on, new requests are refused (503) and those that run end as they would, within
    `limits.drain_seconds`; a second signal breaks them off. `report` is given the URL once it is served, then a line of
    JSON for each request. A port of 0 is any that is free.

    Raises:
        UserError: it cannot listen there.
    """
    with listening(host, port) as listener:
        service = Service(model, limits)
        server = Server(service, f"http://{_name(host)}:{listener.getsockname()[1]}", report)
        server.run(sockets=[listener])
    service.worker.join(JOIN)
    return not server.broken_off


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `UserError` where it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "another --port, or 0 for any that is free, may do" if isinstance(error, OSError) else "0 to 65535"
        raise UserError(f"Cannot listen on {host}:{port}: {reason}; {hint}") from error


def _name(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
