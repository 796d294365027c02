"""The access log: a line of JSON for each request, without its prompt, its answer or its key."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axon.serve.request import Finish


@dataclass
class Record:
    """What is told of a request: filled in while it is answered.

    `seconds` is until the whole answer was handed to the network, `first_token_seconds` until there was a token.
    `finish`: why its choices ended, or `gone` where the client left first. `error`: that ended a stream.
    """

    method: str
    path: str
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    finish: list[str] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self):
        self._began = time.monotonic()

    def first_token(self) -> None:
        """Now, if there was none before."""
        if self.first_token_seconds is None:
            self.first_token_seconds = round(time.monotonic() - self._began, 6)

    def end(self, sent: bool) -> None:
        self.seconds = round(time.monotonic() - self._began, 6)
        if not sent:
            self.finish = ["gone" if self.error is None else Finish.FAILED]

    def line(self) -> str:
        """As JSON, with what there is of it."""
        kept = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        return json.dumps({"time": round(time.time(), 3), **kept})


class AccessLog:
    """An ASGI app that tells of each request of another, once it has ended: a line to `log`, and its record and
    route's path to `count`."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None], count: Callable[[Record, str], None]):
        self.app, self.log, self.count = app, log, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record = Record(scope["method"], scope["path"][:200])
        scope.setdefault("state", {})["record"] = record
        sent = False

        async def noting(message: Message) -> None:
            nonlocal sent
            record.status = message.get("status", record.status)
            await send(message)
            sent = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, noting)
        finally:
            record.end(sent)
            self.count(record, getattr(scope.get("route"), "path", "other"))
            self.log(record.line())
