"""A folder or TensorStore URL of tokenizers and token stores, each written atomically."""

import contextlib
import fcntl
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts
from isal.isal_zlib import crc32

from axon.disk import FREE_SPACE, cache_folder, delete_own, is_array_file, is_full
from axon.errors import UserError
from axon.object_store import local_path, store_spec


class Root:
    """Keys to values below one folder or URL (`file://`, `s3://`, `gs://`, `memory://`).

    What takes long to write goes below a `part` of its own, and a small JSON value that names the part is written last,
    in one atomic operation and only if no other process was first. So a part that no value names is incomplete.
    """

    def __init__(self, location: str | None):
        text = str(cache_folder()) if location is None else location
        self.local: Path | None = local_path(text, "Data.store")
        # One context: a `memory://` store lives as long as it does, and it caches the indexes of remote shards.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})
        spec = store_spec(text, "Data.store")
        self.location = str(self.local or text)
        self._keys: ts.KvStore = self.ask(lambda: ts.KvStore.open(spec, context=self._context).result())

    def ask(self, question: Callable[[], Any]) -> Any:
        """What `question` returns.

        Raises:
            UserError: TensorStore failed; it raises ValueError for everything, from a bad URL to a full disk.
        """
        try:
            return question()
        except (ValueError, OSError) as error:
            advice = "Set Data.store to a folder or a URL (file://, s3://, gs://), or $AXON_CACHE to a folder."
            raise UserError(
                f"The token store {self.location} is unavailable: {error} {FREE_SPACE if is_full(error) else advice}"
            ) from None

    @contextlib.contextmanager
    def intact(self, folder: str) -> Iterator[None]:
        """Within, what is stored below `folder` is read; where that fails, the `UserError` says what to delete."""
        try:
            yield
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"{self.location}/{folder} cannot be read: {error}. If it is damaged, delete that folder and run the "
                "same command again: it is written again"
            ) from error

    def read(self, key: str) -> str | None:
        """The text under `key`, or None."""
        found = self.ask(lambda: self._keys.read(key).result())
        with self.intact(key.rpartition("/")[0]):
            return found.value.decode() if found.state == "value" else None

    def crc32(self, key: str) -> int:
        """The CRC-32 of the bytes under `key`; 0 if there are none."""
        return crc32(self.ask(lambda: self._keys.read(key).result()).value)

    def write_once(self, key: str, text: str) -> str:
        """Writes `text` under `key` unless it has a value; returns its value."""
        absent = self.ask(lambda: self._keys.read(key).result())
        if absent.state == "missing":
            condition = absent.stamp.generation
            self.ask(lambda: self._keys.write(key, text.encode(), if_equal=condition).result())
        return self.read(key) or text

    def array(self, key: str, **options: Any) -> ts.TensorStore:
        """The zarr3 array at `key`; `options` go to `tensorstore.open`, which raises `ValueError` if it fails."""
        spec = {"driver": "zarr3", "kvstore": (self._keys / f"{key}/").spec().to_json(), **options.pop("spec", {})}
        return ts.open(spec, context=self._context, **options).result()

    def delete(self, prefix: str) -> None:
        """Deletes everything below `prefix`, a part that this process began."""
        if self.local:
            shutil.rmtree(self.local / prefix, ignore_errors=True)  # a part of this process's own
        else:
            everything = ts.KvStore.KeyRange(f"{prefix}/", f"{prefix}0")  # "0" is the character after "/"
            self._keys.delete_range(everything).result()

    def once(self, key: str, make: Callable[[str], str], report: Callable[[str], None]) -> str:
        """The text under `key`, from `make` if there is none yet.

        `make` gets a new part next to `key` to write in, and returns the text that names it. On a local root one
        process runs `make` while others wait; on a remote one all run it, and the first to finish counts.
        """
        text = self.read(key)
        if text is not None:
            return text
        folder = key.rpartition("/")[0]
        with self._alone(folder, report) as alone:
            text = self.read(key)
            if text is not None:
                return text
            if alone:
                self._sweep(folder)
            return self._make(key, f"{folder}/{_ours()}{secrets.token_hex(4)}", make)

    def _sweep(self, folder: str) -> None:
        """Deletes the parts of killed processes of this machine: safe, as no value names them and we hold the lock.
        What is not all ours stays."""
        if self.local:
            for part in (self.local / folder).iterdir():
                if re.fullmatch(rf"{re.escape(_ours())}[0-9a-f]{{8}}", part.name):
                    with contextlib.suppress(UserError, OSError):
                        delete_own(part, is_array_file)

    def _make(self, key: str, part: str, make: Callable[[str], str]) -> str:
        try:
            text = make(part)
            first = self.write_once(key, text)
        except BaseException:
            self.delete(part)
            raise
        if first != text:
            self.delete(part)
        return first

    @contextlib.contextmanager
    def _alone(self, folder: str, report: Callable[[str], None]) -> Iterator[bool]:
        """Holds the folder's lock, where there can be one; whether it does."""
        if not self.local:
            yield False
            return
        path = self.local / folder
        self.ask(lambda: path.mkdir(parents=True, exist_ok=True))
        with self.ask(lambda: (path / "lock").open("w")) as lock:
            yield _lock(lock.fileno(), lambda: report(f"waiting for another process that is writing {path}"))


def _ours() -> str:
    """How the names of this machine's parts begin."""
    return f"part-{socket.gethostname()}-"


def _lock(file: int, when_taken: Callable[[], None]) -> bool:
    """Whether the file could be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        when_taken()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False  # a file system that knows no locks: the first to finish counts, as on a remote root
    return True
