"""A server of the page whose answers are written down beforehand."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from axon.serve.http.page import read_page

STATE = {
    "status": "ok",
    "running": 3,
    "waiting": 1,
    "pages": 512,
    "free_pages": 384,
    "prefix_hits": 620,
    "prefix_queries": 1000,
    "tokens_per_second": 842.4,
    "first_token_seconds": 0.12,
    "token_seconds": 0.018,
}


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["Well", ", it", " works", "."])
    ending: bytes = b"data: [DONE]\n\n"
    endless: bool = False
    error: tuple[int, str] | None = None
    key: str | None = None
    models: list[dict] = field(default_factory=lambda: [{"id": "tiny", "chat": True}, {"id": "base", "chat": False}])
    asked: list[tuple[str, dict, str | None]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[dict]:
        return [body for _, body, _ in self.asked]


class Handler(BaseHTTPRequestHandler):
    """A server of one page and canned answers; `server.script` says which."""

    server: Any

    def do_GET(self):
        if self.path == "/":
            page = read_page()
            self.reply(200, page.html.encode(), page.headers)
        elif self.server.script.key and self.headers["Authorization"] != f"Bearer {self.server.script.key}":
            self.reply_json(401, {"error": {"message": "No valid key"}})
        elif self.path in ("/v1/models", "/state"):
            self.reply_json(200, {"data": self.server.script.models} if self.path == "/v1/models" else STATE)
        else:
            self.reply_json(404, {"error": {"message": f"no {self.path} here"}})

    def do_POST(self):
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append((self.path, body, self.headers["Authorization"]))
        if script.error:
            code, message = script.error
            self.reply_json(code, {"error": {"message": message, "type": "invalid_request_error"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(script)
        except (BrokenPipeError, ConnectionResetError):
            script.gone.set()

    def stream(self, script: Script):
        chat = self.path.startswith("/v1/chat")
        for piece in script.pieces:
            self.event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
        while script.endless and not script.gone.wait(0.02):
            self.event({"choices": []})
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
        self.wfile.write(script.ending)

    def event(self, data: dict):
        """Sent in two halves, as a network may."""
        line = b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
        for half in (line[: len(line) // 2], line[len(line) // 2 :]):
            self.wfile.write(half)
            self.wfile.flush()

    def reply_json(self, code: int, data: dict):
        self.reply(code, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def reply(self, code: int, body: bytes, headers: dict[str, str]):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Does as its script says, which may be another for each test."""

    script = Script()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def serving() -> Iterator[Server]:
    """On a free port of this machine."""
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
