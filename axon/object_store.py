"""Objects by key below a URL (`s3://`, `gs://`, `file://`) or a folder, through TensorStore's key-value stores.

Amazon's variables apply to `s3://`: `AWS_ENDPOINT_URL` names another server, `AWS_REGION` the region;
`AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY`, or else `AWS_PROFILE` and what else Amazon's clients look at, are the
credentials. A server on this machine needs none. To `gs://` those of Google's clients apply.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from axon.disk import location as checked_location
from axon.disk import named
from axon.errors import UserError

ATTEMPTS = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
"""Of a request that fails for a reason that may pass: within some 20 seconds."""
SECONDS = 600
"""A request that has no answer after so long, attempts included, has failed."""
BYTES_IN_PROGRESS = 2**28
"""Of objects that are read or written at a time, unless one alone is larger."""
_MAY = "that this process may read, list, write and delete"
FOLDER_ADVICE = f"Expected a folder {_MAY}, on a disk with space: free some, or change"
ADVICE = (
    f"Expected a folder in a bucket {_MAY}. For s3:// set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "and for another server than Amazon's AWS_ENDPOINT_URL; for gs:// GOOGLE_APPLICATION_CREDENTIALS; or change"
)
OBJECT = 2**20
"""Bytes that a request counts for which takes hardly any memory: so that there are not too many at a time."""
Request = tuple[str, int, Callable[[], Any]]
"""A key, the bytes that it takes in memory, and what begins it, a future of TensorStore's."""


def is_url(location: str | Path) -> bool:
    """Whether it is a URL, not a path."""
    return "://" in str(location)


def local_path(location: str, where: str) -> Path | None:
    """The folder that a location is; None for an object store. `where`: as of `named`, which raises for a bad path."""
    if location.startswith("file://"):
        return Path(unquote(urlsplit(location).path))
    return None if is_url(location) else named(location, where)


def store_spec(location: str, where: str) -> dict[str, Any] | str:
    """What `tensorstore.KvStore.open` takes for a location. Raises `UserError` for a bad path."""
    if folder := local_path(location, where):
        return {"driver": "file", "path": f"{str(folder.resolve()).rstrip('/')}/"}  # it refuses `..`
    url = location if location.endswith("/") else f"{location}/"
    if not location.startswith("s3://"):
        return url
    parts = urlsplit(url)
    found = {"driver": "s3", "bucket": parts.netloc, "path": unquote(parts.path).lstrip("/")}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    found |= {"endpoint": endpoint.rstrip("/")} if endpoint else {}
    found |= {"aws_region": region} if region else {}
    return found | {"aws_credentials": {"type": _credentials(endpoint)}}


def _credentials(endpoint: str | None) -> str:
    """TensorStore's word for where they are. It would log errors of files that are not there if it had to look."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "environment"
    local = urlsplit(endpoint or "").hostname in ("localhost", "127.0.0.1", "::1")
    return "anonymous" if local and not os.environ.get("AWS_PROFILE") else "default"


class Objects:
    """The objects below a location. What fails raises `UserError`, after some attempts where it may pass.

    `where`: the field or option that the location was given for, for messages.
    """

    def __init__(self, location: str, where: str):
        location = checked_location(location, where)
        self.location, self._where = location.rstrip("/") or "/", where
        self.folder = local_path(location, where)
        """That which the location is; None for an object store."""
        context = ts.Context({f"{kind}_request_retries": ATTEMPTS for kind in ("s3", "gcs")})
        spec = store_spec(location, where)
        self._store = self._asked("open", "", lambda: ts.KvStore.open(spec, context=context))

    def read(self, key: str) -> bytes | None:
        """An object; None if there is none."""
        return next(self.read_all({key: 0}))[1]

    def write(self, key: str, content: bytes) -> None:
        """Writes an object: whole or not at all."""
        self.write_all([(key, len(content), lambda: content)])

    def read_all(self, sizes: dict[str, int]) -> Iterator[tuple[str, bytes | None]]:
        """Objects by key, in order, as `read`; `sizes`: about how large each is."""
        requests = ((key, size, lambda key=key: self._store.read(key)) for key, size in sizes.items())
        for key, found in self._in_turn("read", requests):
            yield key, bytes(found.value) if found.state == "value" else None

    def write_all(self, contents: Iterable[tuple[str, int, Callable[[], bytes]]]) -> None:
        """Writes objects: key, size, and what returns the content when it is its turn."""
        begun = ((key, size, lambda key=key, get=get: self._store.write(key, get())) for key, size, get in contents)
        for _ in self._in_turn("write", begun):
            pass

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, which ends with a slash or is empty, sorted. A link in a folder is one."""
        found = self._asked(
            "list", prefix, lambda: self._store.list(_below(prefix) if prefix else ts.KvStore.KeyRange())
        )
        return sorted(key.decode() for key in found)

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, those that there are; of folders those in which nothing is left too."""
        keys = list(keys)
        for _ in self._in_turn("delete", ((key, OBJECT, lambda key=key: self._store.write(key, None)) for key in keys)):
            pass
        if self.folder is not None:
            for below in sorted({*chain(*(PurePosixPath(key).parents for key in keys))} - {PurePosixPath(".")})[::-1]:
                with suppress(OSError):  # it is not empty
                    (self.folder / below).rmdir()

    def _in_turn(self, what: str, requests: Iterable[Request]) -> Iterator[tuple[str, Any]]:
        """Key and result of each request, in order; several are in progress. If one fails, the others are given up."""
        pending: deque[tuple[str, int, Any]] = deque()
        try:
            for key, size, begin in requests:
                while pending and sum(one[1] for one in pending) + size > BYTES_IN_PROGRESS:
                    yield self._ended(what, *pending.popleft())
                pending.append((key, size, begin()))
            while pending:
                yield self._ended(what, *pending.popleft())
        finally:
            for _, _, future in pending:
                future.cancel()

    def _ended(self, what: str, key: str, _: int, future: Any) -> tuple[str, Any]:
        return key, self._asked(what, key, lambda: future)

    def _asked(self, what: str, key: str, begin: Callable[[], Any]) -> Any:
        """The result of a future of TensorStore's, which raises `ValueError` for whatever went wrong."""
        try:
            return begin().result(timeout=SECONDS)
        except (ValueError, TimeoutError) as error:
            why = str(error)[:300] or f"no answer within {SECONDS:,} seconds"
            advice = ADVICE if self.folder is None else FOLDER_ADVICE
            raise UserError(f"cannot {what} {self.location}/{key}: {why}\n{advice} {self._where}") from None


def _below(prefix: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0")  # "0" is the character after "/"
