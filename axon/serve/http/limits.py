"""Limits of what a client may ask of the server, and for how long."""

from dataclasses import dataclass
from pathlib import Path

from axon.checks import check_range
from axon.disk import reading
from axon.errors import UserError


def keys_in(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line, empty lines left out. Raises `UserError` for a file without any."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    if not (keys := tuple(key for line in lines if (key := line.strip()))):
        raise UserError(f"{path} has no key: give one a line")
    return keys


@dataclass(frozen=True)
class Limits:
    """Beyond each a client has a 4xx that says so.

    Args:
        keys: whoever shows one of these as a bearer token may ask; with none, everyone.
        body_bytes: of a request. body_seconds: in which its body must have come.
        tokens: to generate for a choice; None: as many as the model has positions.
        requests: choices that run or wait at once, of all clients. texts: to embed, likewise; a request may have all.
        queue_seconds: that a request may wait for its first token.
        unread: updates of a choice, of a token or a few each, that a slow reader may leave, besides what sockets hold.
        drain_seconds: from the signal to end until what still runs is broken off.
    """

    keys: tuple[str, ...] = ()
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30
    tokens: int | None = None
    requests: int = 256
    texts: int = 2048
    queue_seconds: float = 300
    unread: int = 4096
    drain_seconds: float = 60

    def __post_init__(self):
        check_range(self, "[1, inf)", "body_bytes", "tokens", "requests", "texts", "unread")
        check_range(self, "(0, 2**31)", "body_seconds", "queue_seconds")
        check_range(self, "[0, 2**31)", "drain_seconds")
        for key in self.keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError("Limits.keys: a key must be printable ASCII without spaces, and not empty")
