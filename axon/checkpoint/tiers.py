"""Two folders of checkpoints: a durable one, and a local, faster one into which a run saves more often."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import numpy as np
from etils import epath

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import Checkpoints
from axon.checkpoint.reader import Reader
from axon.checkpoint.set_aside import latest_of, newest_intact
from axon.checkpoint.store import Store
from axon.disk import locked, writing
from axon.errors import UserError

T = TypeVar("T")
_ERROR_BYTES = 1024
"""Of an error of process 0, so many reach the others."""


def open_store(directory: epath.PathLike, checkpoints: Checkpoints, place: str, run: str | None = None) -> "RunStore":
    """The store in `directory`; with `Checkpoints.local_folder` both, the local one in a folder named `place` in that.

    Args:
        place: a name that no other run has, so that none finds the checkpoints of another there. run: as of `Store`.
    """
    if checkpoints.local_folder is None:
        return Store(directory, checkpoints, run)
    local = _local(checkpoints.local_folder, place)
    _check_one_folder(local)
    return Tiers(Store(directory, checkpoints, run), Store(local, checkpoints.of_local(), run))


def newest_reader(directory: epath.PathLike, checkpoints: Checkpoints, run: str | None) -> Reader:
    """Of the folder that has the latest complete checkpoint, `directory` or the local one. `run`: None if it has not
    begun."""
    readers = [Reader(directory)]
    if checkpoints.local_folder is not None and run is not None:
        readers.append(Reader(_local(checkpoints.local_folder, run)))
    return latest_of(readers)


class Tiers:
    """The checkpoints of a run in two stores, used as one `Store` is: the latest is that of either.

    If those in the local folder are gone, because a machine or its memory is, the latest durable one is the latest.
    In its context process 0 has the local folder locked: `axon checkpoint prune` may be given that folder.
    """

    def __init__(self, durable: Store, local: Store):
        self._durable, self._local = durable, local
        self.directory, self.checkpoints, self.losses = durable.directory, durable.checkpoints, durable.losses
        self.copying = durable.copying
        self.notices: list[str] = []
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        if jax.process_index() == 0:
            self._lock.enter_context(locked(str(self._local.directory)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with self._lock:
            try:
                self._local.close()
            finally:
                self._durable.close()

    def newest(self, load: Callable[[], T]) -> T:
        """As `Store.newest`, of both folders."""
        return newest_intact(self._stores, load, self.notices)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint in either folder, ascending."""
        return sorted({*self._durable.steps(), *self._local.steps()})

    def latest(self) -> int | None:
        """The last of `steps`, or None."""
        return max(self.steps(), default=None)

    def started(self, durable: bool = False) -> int | None:
        """The last step that is saved or being saved, in either folder or in the durable one; None: there is none."""
        stores = [self._durable] if durable else self._stores
        return max((step for store in stores if (step := store.started()) is not None), default=None)

    def saving(self) -> bool:
        """Whether a save is in progress."""
        return self._local.saving() or self._durable.saving()

    def save(self, step: int, state: Any, extra: Mapping[str, Any], specs: Any = None, *, durable: bool = True) -> None:
        """Saves in the durable folder or in the local one, as `Store.save` does."""
        saving, other = (self._durable, self._local) if durable else (self._local, self._durable)
        other.wait()
        saving.save(step, state, extra, specs)

    def write_checksums(self) -> None:
        """As `Store.write_checksums`; there is nothing to add to the one that was saved before the last."""
        self._local.write_checksums()
        self._durable.write_checksums()

    def wait(self) -> None:
        """As `Store.wait`, in both folders."""
        self._local.wait()
        self._durable.wait()

    @property
    def _stores(self) -> list[Store]:
        return [self._durable, self._local]

    def of_step(self, step: int | None = None) -> Store:
        """The store that has a step; None: the latest."""
        if step is None:
            return latest_of(self._stores)
        return self._local if step not in self._durable.steps() and step in self._local.steps() else self._durable


RunStore = Store | Tiers
"""The checkpoints of the run that saves them, in one folder or in two."""


def _local(folder: str, run: str) -> epath.Path:
    return epath.Path(folder).expanduser().absolute() / run


def _check_one_folder(folder: epath.Path) -> None:
    """Raise `CheckpointError` if the processes do not share a local folder: each would have parts of a checkpoint.

    Every process has to call, and all raise if process 0 cannot write.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

    number = str(broadcast_one_to_all(np.int32(np.random.default_rng().integers(2**31))))
    mark = folder.parent / f"{folder.name}.processes"
    error = _write_mark(mark, number) if jax.process_index() == 0 else b""
    if error := bytes(broadcast_one_to_all(np.frombuffer(error.ljust(_ERROR_BYTES), np.uint8))).rstrip():
        raise CheckpointError(error.decode(errors="ignore"))
    seen = mark.exists() and mark.read_text() == number
    if not np.all(process_allgather(np.bool_(seen))):
        raise CheckpointError(
            f"Checkpoints.local_folder is {str(folder.parent)!r}, which the processes of this run do not share. It has "
            "to be one folder that all see, as of processes on one machine. Unset it and Checkpoints.local_every"
        )


def _write_mark(mark: epath.Path, content: str) -> bytes:
    """What went wrong, empty if nothing did."""
    try:
        with writing(str(mark.parent), "Set Checkpoints.local_folder to another folder"):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(content)
    except UserError as error:
        return str(error).encode()[:_ERROR_BYTES]
    return b""
