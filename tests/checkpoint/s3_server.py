"""An S3-compatible server on this machine, in memory, that can be told to fail."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

LISTED = 3
"""Keys in one answer: so few that all lists are continued."""


class Server(ThreadingHTTPServer):
    """`objects`: the content of each, by `/bucket/key`. `asked`: the requests so far, as (method, key).

    `refuse(method, key)`: the status to answer with, or None. `cut(key)`: whether a body ends before it is whole.
    `seconds`: before each answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], int | None] = lambda method, key: None
        self.cut: Callable[[str], bool] = lambda key: False
        self.seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms
    server: Server

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True  # a client that was killed

    def _begun(self) -> bool:
        """Whether to answer: notes the request, and reads its body."""
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.key = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, self.key))
        time.sleep(self.server.seconds)
        status = self.server.refuse(self.command, self.key)
        if status is not None:
            self._answer(status, b"<Error><Code>told to</Code></Error>")
        return status is None

    def do_HEAD(self):
        if self._begun():
            self._object() if self.key.count("/") > 1 else self._answer(200, b"")

    def do_GET(self):
        if self._begun():
            self._list() if "list-type" in self.path else self._object()

    def do_PUT(self):
        if self._begun():
            self.server.objects[self.key] = self.body
            self._answer(200, b"", ETag=_etag(self.body))

    def do_DELETE(self):
        if self._begun():
            self.server.objects.pop(self.key, None)
            self._answer(204, b"")

    def _object(self) -> None:
        content = self.server.objects.get(self.key)
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            where = f"bytes {first}-{last}/{len(content)}"
            self._answer(206, content[first : last + 1], **{"ETag": _etag(content), "Content-Range": where})
        else:
            self._answer(200, content, ETag=_etag(content))

    def _list(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        bucket = self.key.rstrip("/") + "/"
        begin, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        names = sorted(key.removeprefix(bucket) for key in self.server.objects if key.startswith(bucket))
        found = [name for name in names if name.startswith(begin) and name > after]
        more = f"<NextContinuationToken>{escape(found[LISTED - 1])}</NextContinuationToken>" if found[LISTED:] else ""
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><ETag>{_etag(self.server.objects[bucket + name])}</ETag>"
            f"<Size>{len(self.server.objects[bucket + name])}</Size></Contents>"
            for name in found[:LISTED]
        )
        truncated = str(len(found) > LISTED).lower()
        text = f"<KeyCount>{len(found[:LISTED])}</KeyCount><IsTruncated>{truncated}</IsTruncated>{more}{items}"
        self._answer(200, f'<?xml version="1.0"?><ListBucketResult>{text}</ListBucketResult>'.encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            cut = status in (200, 206) and self.command == "GET" and self.server.cut(self.key)
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut

    def log_message(self, format, *args):
        pass


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
