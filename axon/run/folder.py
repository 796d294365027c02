"""The folder of a run: what is in it, and whether it may be continued."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from axon.checkpoint import Checkpoints, Reader, newest_reader
from axon.checkpoint.remote import fetched_run
from axon.config import dump, load
from axon.disk import as_path, reading, writing
from axon.errors import UserError, did_you_mean
from axon.fields import changed, differences, differs_by_machine, leaves, may_change, skipped
from axon.foreign_json import NULL, OBJECT, TEXT, list_of, read_field, read_json
from axon.object_store import is_url


class RunFolder:
    """`config.gin`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `tokenizer.json`, `loss.png`, `run.json`,
    `profile/`, `lock` and `id` of one run, `huggingface/`: what came with the weights of a model of the hub that it
    began with, `remarked.jsonl`: which examples were dropped, cut or repeated, and `weights/`, by which
    `Rollouts.samplers` sample while it trains.

    `mirror`: the location that it is a copy of, for messages.
    """

    def __init__(self, path: Path | str, mirror: str | None = None):
        self.path = Path(path)
        self._is_copy = mirror is not None
        self._named = (str(path), "--run-dir") if mirror is None else (mirror, "Checkpoints.mirror")
        self.config = self.path / "config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = self.path / "tokenizer.json"
        self.plot = self.path / "loss.png"
        self.record = self.path / "run.json"
        self.profile = self.path / "profile"
        self.lock = self.path / "lock"
        self.id = self.path / "id"
        self.companions = self.path / "huggingface"

    @classmethod
    def existing(cls, path: Path | str) -> "RunFolder":
        """The folder of an existing run; `UserError` if `path` is not one. For a mirror's URL: a copy of it."""
        if is_url(path):
            path = fetched_run(str(path), "the run's folder")
        folder = cls(as_path(path, "the run's folder"))
        with reading(folder.config):
            begun = folder.config.is_file()
        if not begun and not folder.path.exists():
            near = did_you_mean(folder.path.name, (one.name for one in folder.path.parent.glob("*")))
            raise UserError(f"there is no folder {path}, where that of a run is expected.{near}")
        if not begun:
            raise UserError(f"{path} is not the folder of a run: it has no config.gin. `axon train` writes one")
        return folder

    def tree(self) -> Any:
        """The `Train` that the folder records."""
        return load(self.config).tree

    def check_continues(self, train: Any) -> dict[str, list[str]]:
        """Raise `UserError`, with every difference, if `train` is not the run that is recorded here.

        Returns the fields that differ and may, without paths and the mesh: what they were and what they are.
        """
        if self.trained() or (self._is_copy and self.config.is_file()):
            before, now = self.tree(), _as_recorded(train)
            self._refuse(differences(before, now, may_change), train)
            fields = changed(leaves(before, differs_by_machine), leaves(now, differs_by_machine))
            return {path: [a, b] for path, a, b in fields if path != "layout.mesh"}
        if foreign := self._foreign():
            raise UserError(f"{foreign} is not of a run: this run would overwrite it. Give another --run-dir")
        return {}

    def check_same_tokens(self, tokenizer: str) -> None:
        """Raise `UserError` if this run's tokenizer is not `tokenizer`, the text of a tokenizer.json."""
        with reading(self.tokenizer):
            same = self.tokenizer.read_text(encoding="utf-8") == tokenizer
        if not same:
            raise UserError(
                f"Train.init_from = {str(self.path)!r}: its tokenizer differs from this run's, so its embeddings would "
                f"be of other tokens. Set Data.tokenizer = @TokenizerFile() and TokenizerFile.path = "
                f"{str(self.tokenizer)!r}"
            )

    def check_same_text(self, train: Any, data_identity: Mapping[str, Any]) -> None:
        """Raise `UserError` if the recorded run was trained on other text or pictures."""
        before, now = self._recorded_digests(), data_identity["digests"]
        if before not in (None, now):
            self._refuse([f"data: its content has changed (digests {before} → {now})"], train)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: another process that trained here would delete the checkpoint that this one is saving.

        Raises `UserError` if another process has the lock, or if the folder cannot be written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self.lock.open("ab+", buffering=0)
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().decode() or "another process"
                raise UserError(
                    f"{self.path} is locked by {owner}: wait for it, stop it, or give another --run-dir"
                ) from None
            except OSError:
                pass  # a file system without locks
            lock.seek(0)
            if (content := lock.read(64)) and not content.startswith(b"process "):
                raise UserError(f"{self.lock} is not of a run: this run would overwrite it. Give another --run-dir")
            with self._writing():
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield

    def write(self, train: Any, record: Mapping[str, Any]) -> None:
        """Record the run, before anything else is written. Raises `UserError` if the folder cannot be written."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.record, json.dumps(record, indent=2, default=str) + "\n")
            _replace(self.config, dump(train))
            if not self.id.is_file():
                _replace(self.id, uuid4().hex)

    def write_remarked(self, remarked: Mapping[str, Sequence[str]]) -> Path:
        """Record where examples are of which something is said, each as a line of JSON; returns the file."""
        with self._writing():
            each = ({"where": where, "what": what} for what, places in remarked.items() for where in places)
            _replace(path := self.path / "remarked.jsonl", "".join(json.dumps(one) + "\n" for one in each))
        return path

    def identity(self) -> str:
        """A name that no other run has: not one that was in this folder before, nor a copy of this folder."""
        return uuid5(NAMESPACE_URL, f"{self.path.resolve().as_uri()}#{self.identifier()}").hex

    def identifier(self) -> str:
        """A name that no other run has but copies of this one."""
        with reading(self.id):
            return self.id.read_text("utf-8")

    def reader(self, checkpoints: Checkpoints) -> Reader:
        """Of its latest checkpoint, in `checkpoints/` or in the local folder that `checkpoints` names."""
        return newest_reader(self.checkpoints, checkpoints, self.identity() if self.id.is_file() else None)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "Give another --run-dir")

    def trained(self) -> bool:
        """Whether there is anything to continue: a run that did not reach its first step may be replaced by another."""
        with reading(self.path):
            logged = self.metrics.is_file() and self.metrics.stat().st_size > 0
            return self.config.is_file() and (logged or Reader(self.checkpoints).latest() is not None)

    def parent(self) -> dict[str, Any] | None:
        """What a branch began with, from run.json; None for what is none, or did not reach its first step."""
        if not (self.trained() and self.record.is_file()):
            return None
        return read_field(str(self.record), read_json(self.record), "parent", OBJECT | NULL, None)

    def _foreign(self) -> Path | None:
        """A file that has one of a run's names, and that none wrote: what a run writes first is its record."""
        if not self.record.is_file():
            files = (self.config, self.metrics, self.events, self.tokenizer, self.plot, self.id)
            return next((path for path in files if path.exists() or path.is_symlink()), None)
        try:
            ours = self.config.is_file() or "versions" in read_json(self.record)
        except UserError:
            ours = False
        return None if ours else self.record

    def _recorded_digests(self) -> list[str] | None:
        """Digests of what the run was trained on, from run.json; None if it has none."""
        if not (self.trained() and self.record.is_file()):
            return None
        try:
            data = read_field(str(self.record), read_json(self.record), "data", OBJECT, {})
            return read_field(f"{self.record}: data", data, "digests", list_of(TEXT) | NULL, None)
        except UserError as error:
            raise UserError(f"{error}. Delete it to continue without checking that the text is the same") from error

    def _refuse(self, found: Sequence[str], train: Any) -> None:
        if found:
            name, field = self._named
            raise UserError(
                f"{name} has another run; it differs in\n"
                + "\n".join(f"  {line}" for line in found)
                + f"\nGive another {field}, or undo the changes. What may change: "
                + ", ".join(skipped(train, may_change))
            )


def _as_recorded(train: Any) -> Any:
    """`train` as read back from config.gin: a list as a tuple, a path as a string, an integer perhaps as a float."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.gin"
        path.write_text(dump(train), encoding="utf-8")
        return load(path).tree


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
