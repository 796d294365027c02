"""A run's checkpoints in an object store, with what else of its folder a run needs to go on.

Below the location are the same files by the same names as in the run's folder: a copy of it all is a run's folder.
Besides there are

    complete/STEP-TIME.json   written after all else of a checkpoint, with the lengths of its files: without it there is
                              none of that step. `TIME`: when it was saved, so that a step that is saved again differs
    owner                     the process that copies: one that finds another here stops
"""

import hashlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from etils import epath

from axon.checkpoint.checksums import files_below
from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.ownership import STATE, STEP, is_file_of_checkpoint
from axon.checkpoint.reader import listed
from axon.checkpoint.verify import Damage, damage_here, saved_time
from axon.disk import cache_folder, reading, writing
from axon.errors import UserError
from axon.object_store import Objects
from axon.signed_json import signed, unsigned

CHECKPOINTS, COMPLETE, OWNER = "checkpoints/", "complete/", "owner"
FILES = ("run.json", "config.gin", "id", "tokenizer.json", "metrics.jsonl", "events.jsonl")
"""Of a run's folder, what is copied besides its checkpoints; its record first, as a run writes them."""
_MARKER = re.compile(rf"{COMPLETE}({STEP.pattern})-(\d+)\.json")
Report = Callable[[str], None]


class Copy(NamedTuple):
    """A checkpoint: its step, and when it was saved, in nanoseconds since 1970."""

    step: int
    saved: int

    @property
    def below(self) -> str:
        return f"{CHECKPOINTS}{self.step}/"

    @property
    def marker(self) -> str:
        return f"{COMPLETE}{self.step}-{self.saved}.json"


class Fetched(NamedTuple):
    """A checkpoint that was fetched, its bytes and how long that took, and a line about each later one."""

    copy: Copy
    size: int
    seconds: float
    damaged: tuple[str, ...]


def copy_of(folder: Path, step: int) -> Copy:
    """The identity of a checkpoint in a run's folder: its step and time."""
    return Copy(step, saved_time(epath.Path(folder / CHECKPOINTS / str(step))))


def is_copy(folder: epath.PathLike) -> bool:
    """Whether a folder is the copy of a run's folder."""
    return (epath.Path(folder) / COMPLETE).is_dir()


class Remote:
    """The copy of a run's folder at a location. Methods raise `UserError` for what fails.

    `where`: the field or option that the location was given for, for messages.
    """

    def __init__(self, location: str, where: str):
        self._objects = Objects(location, where)
        self.location, self.folder = self._objects.location, self._objects.folder
        self._written: dict[Path, tuple[int, int]] = {}

    def copies(self) -> list[Copy]:
        """The complete checkpoints, by step."""
        markers = map(_MARKER.fullmatch, self._objects.keys(COMPLETE))
        return sorted(Copy(int(one[1]), int(one[2])) for one in markers if one)

    def foreign(self) -> str | None:
        """Something there that is no part of a copy which a run made of itself; None if there is nothing else."""
        keys = self._objects.keys("")
        return next((key for key in keys if OWNER not in keys or not is_part_of_copy(key)), None)

    def steps(self) -> set[int]:
        """The steps of which there is any file, complete or not."""
        folders = (re.match(CHECKPOINTS + r"(\d+)/", key) for key in self._objects.keys(CHECKPOINTS))
        return {int(one[1]) for one in folders if one}

    def put(self, copy: Copy, folder: Path) -> int:
        """Copies a checkpoint of a run's folder, then `FILES`; the checkpoint's bytes.

        Raises `FileNotFoundError` if the checkpoint is deleted meanwhile.
        """
        self.put_files(folder)  # first of all whose copy it is
        self.remove(copy.step)
        paths = {str(path.relative_to(folder)): path for path in files_below(epath.Path(folder / copy.below))}
        sizes = {name: path.stat().length for name, path in paths.items()}
        self._objects.write_all((name, sizes[name], path.read_bytes) for name, path in paths.items())
        self.put_files(folder)
        self._objects.write(copy.marker, signed({"files": sizes}).encode())
        return sum(sizes.values())

    def put_files(self, folder: Path) -> None:
        """Copies the `FILES` that there are in a run's folder, unless they are as they were at the last call."""
        now = {path: _signature(path) for name in FILES if (path := folder / name).is_file()}
        changed = {path: signature for path, signature in now.items() if self._written.get(path) != signature}
        self._objects.write_all((path.name, size, path.read_bytes) for path, (_, size) in changed.items())
        self._written |= changed

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, its marker first; one that is not there too. What is no part of one stays."""
        self._objects.delete(copy.marker for copy in self.copies() if copy.step == step)
        self._objects.delete(key for key in self._objects.keys(f"{CHECKPOINTS}{step}/") if is_part_of_copy(key))

    def fetch_files(self, folder: Path) -> None:
        """Writes the `FILES` that there are into `folder`."""
        for name, content in self._objects.read_all(dict.fromkeys(FILES, 0)):
            if content is not None:
                _write(folder / name, content)

    def fetch(self, copy: Copy, folder: Path) -> tuple[int, list[Damage]]:
        """Writes a checkpoint into a run's folder, and compares it with its checksums: its bytes, and what differs."""
        try:
            sizes: dict[str, int] = unsigned((self._objects.read(copy.marker) or b"").decode())["files"]
        except ValueError:
            return 0, [Damage(copy.marker, "its own checksum differs")]
        if strange := [name for name in sizes if not name.startswith(copy.below) or not is_part_of_copy(name)]:
            return 0, [Damage(copy.marker, f"it names {strange[0]}, which is no part of checkpoint {copy.step}")]
        for name, content in self._objects.read_all(sizes):
            if content is None or len(content) != sizes[name]:
                what = "it is missing" if content is None else f"it has {len(content):,} bytes"
                return 0, [Damage(name.removeprefix(copy.below), f"{what}, and {sizes[name]:,} were copied")]
            _write(folder / name, content)
        with reading(folder):
            return sum(sizes.values()), damage_here(epath.Path(folder / copy.below), STATE)

    def fetch_newest(self, copies: Iterable[Copy], folder: Path, report: Report) -> Fetched | None:
        """The newest intact one of `copies` in a run's folder, and a line about each that is damaged; None: all are."""
        damaged = []
        for copy in sorted(copies, reverse=True):
            began = time.monotonic()
            report(f"fetching checkpoint {copy.step} from {self.location}")
            size, damage = self.fetch(copy, folder)
            if not damage:
                return Fetched(copy, size, round(time.monotonic() - began, 3), tuple(damaged))
            damaged.append(f"checkpoint {copy.step} in {self.location} is damaged: {listed(damage)}")
            report(damaged[-1])
            shutil.rmtree(folder / copy.below, ignore_errors=True)
        return None

    def claim(self, owner: str) -> None:
        """Makes `owner` the one that copies here. Raises `UserError` if nothing can be written."""
        self._objects.write(OWNER, owner.encode())

    def check_owner(self, owner: str) -> None:
        """Raise `UserError` if another one copies here."""
        current = (self._objects.read(OWNER) or b"").decode()
        if current != owner:
            raise UserError(f"{self.location} was taken over by {current or 'nobody: its file `owner` is gone'}")


def working_folder(url: str) -> Path:
    """The folder, in Axon's cache, in which a run is whose folder is at a URL."""
    return _cached(url) / "run"


def _cached(url: str) -> Path:
    url = url.rstrip("/")
    return cache_folder() / "runs" / f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def fetched_run(url: str, where: str) -> Path:
    """The folder, in Axon's cache, of the run whose mirror is at `url`, with its newest intact checkpoint.

    What is fetched is said on standard error. Raises `UserError` if there is none, or it cannot be read.
    """
    remote = Remote(url, where)
    folder = _cached(url)
    copies = remote.copies()
    if copies and (known := folder / f"{copies[-1].step}-{copies[-1].saved}").is_dir():
        return known
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder))
    try:
        remote.fetch_files(aside)
        fetched = remote.fetch_newest(copies, aside, _say)
        if fetched is None:
            raise CheckpointError(f"{where}: there is no complete and intact checkpoint in {url}")
        target = folder / f"{fetched.copy.step}-{fetched.copy.saved}"
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
        return target
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_part_of_copy(key: str) -> bool:
    """Whether an object of this key is part of a run's copy."""
    below = re.fullmatch(rf"{CHECKPOINTS}(?:{STEP.pattern})/(.+)", key)
    return key in (*FILES, OWNER) or bool(_MARKER.fullmatch(key) or (below and is_file_of_checkpoint(below[1])))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _signature(path: Path) -> tuple[int, int]:
    """Time and size of a file, of which one changes whenever it is written."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
