"""Saving checkpoints while training goes on."""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from etils import epath

from axon.checkpoint.checksums import write_checksums, write_part
from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import Checkpoints, steps_to_keep
from axon.checkpoint.orbax import ArrayTree, saving, training
from axon.checkpoint.ownership import RUN, STEP, is_checkpoint, obstacle, remove, sweep
from axon.checkpoint.quiet import SETTLE_SECONDS, quiet_log
from axon.checkpoint.reader import EXTRA, STATE, UNPADDED, Reader
from axon.checkpoint.set_aside import newest_intact
from axon.checkpoint.tree import flat, storable, unpadded
from axon.checkpoint.verify import saved_time
from axon.disk import FREE_SPACE, is_full, reason
from axon.runtime import nested
from axon.runtime.stored import is_stored

T = TypeVar("T")


class Store(Reader):
    """The checkpoints of the one run that writes into `directory`, which is created if missing.

    Opening it deletes the remains of killed saves, so only the run itself may open a `Store`; all others open a
    `Reader`. A context manager; closing waits for the save in progress.

    When a save is complete, those that `checkpoints` does not keep are deleted, in a thread of process 0; what is not
    a checkpoint of this `run`, as RunFolder's identifier names it, is left alone (`axon.checkpoint.ownership`).

    Loading the `newest` sets damaged ones aside, under another name; `notices` has a line about each.

    `losses`: for `Checkpoints.keep_best`, the held-out loss of steps, to be filled in as they become known.
    `copying`: steps that are not deleted as long as they are in it.
    """

    def __init__(self, directory: epath.PathLike, checkpoints: Checkpoints, run: str | None = None):
        super().__init__(directory)
        self.checkpoints, self._run = checkpoints, run
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"cannot store checkpoints in {self.directory}: it is not a folder")
        _check_only_checkpoints(self.directory)
        self.notices: list[str] = []
        self.losses: dict[int, float] = {}
        self.copying: set[int] = set()
        self._orbax = _opened(self.directory, run)
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet_log())
        self._started = self.latest()
        self._without_checksums: epath.Path | None = None
        self._deleting = ThreadPoolExecutor(1, "axon checkpoints")
        self._deleted: Future[None] | None = None
        self._begun: Any = None
        """Orbax's answer to the last save: a thread with an event loop, until its result is asked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def newest(self, load: Callable[[], T]) -> T:
        """What `load` returns, which restores the latest checkpoint; if that is damaged, the newest intact one.

        Raises `CheckpointError`, and renames nothing, if every checkpoint is damaged.
        """
        return newest_intact([self], load, self.notices)

    def renamed(self) -> None:
        """To be called when folders of this store's checkpoints were renamed."""
        self._orbax.reload()
        self._started = self.latest()

    def started(self, durable: bool = False) -> int | None:
        """The last step that is saved or being saved, or None. `durable`: of two folders, see `Tiers`."""
        return self._started

    def of_step(self, step: int | None = None) -> "Store":
        """The store itself, which has all steps, as of `Tiers`."""
        return self

    def saving(self) -> bool:
        """Whether a save is in progress."""
        return self._orbax.is_saving_in_progress()

    def save(self, step: int, state: Any, extra: Mapping[str, Any], specs: Any = None, *, durable: bool = True) -> None:
        """Saves `state`, a tree of arrays, and `extra`, a dictionary fit for JSON, as checkpoint `step`.

        `specs`: the state's tree of `ArraySpec`s, if arrays of it are padded: they can be restored with other padding.
        `durable`: in which of two folders, see `Tiers`.

        Returns once the arrays are copied, so that they may be donated; if `asynchronous`, they are written while the
        next steps run. Where some are in files, returns once all are saved: the next step overwrites the files. At
        most one save is in progress: a second waits for the first. Raises `CheckpointError` if
        `step` is not after the last one (see `started`), or if this or the previous save could not be written.
        """
        if self._started is not None and step <= self._started:
            raise CheckpointError(f"cannot save step {step} in {self.directory}: step {self._started} is saved already")
        shapes = unpadded(specs)
        content = {EXTRA: dict(extra)} | ({UNPADDED: shapes} if shapes else {})
        content |= {RUN: self._run} if self._run is not None else {}
        content = json.loads(json.dumps(content))  # as it will be read; fails before anything is written
        arrays = nested({path: storable(path, leaf) for path, leaf in flat(state).items()})
        in_files = any(map(is_stored, flat(state).values()))
        checksum = partial(write_part, process=jax.process_index(), processes=jax.process_count(), content=content)
        self.wait()
        if (self.directory / str(step)).exists():
            raise self._unwritten(step, f"there is a {step} already, which is no checkpoint: move it elsewhere")
        try:
            with saving():
                self._begun = self._orbax.save_checkpointables_async(
                    step, {STATE: ArrayTree(arrays, checksum)}, force=True, custom_metadata=content
                )
        except (OSError, ValueError) as error:
            raise self._unwritten(step, error) from error
        if self._begun is None:
            raise self._unwritten(step, "Orbax declined to save")
        self._started, self._without_checksums = step, self.directory / str(step)
        self._damage.pop(step, None)  # of one with this number that was set aside
        if in_files or not self.checkpoints.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when the save in progress is complete on disk. Raises `CheckpointError` if it failed."""
        begun, self._begun = self._begun, None
        try:
            self._orbax.wait()
            if begun is not None:
                begun.result()
        except (OSError, ValueError) as error:
            self._without_checksums = None  # or closing would look for it, and say that instead
            raise self._unwritten(self._started, error) from error
        self.write_checksums()
        if self._deleted is not None:
            self._deleted.result()

    def write_checksums(self) -> None:
        """Adds the checksums of what Orbax wrote last of the checkpoint that was saved last, and is now complete.

        Raises `CheckpointError` if they cannot be written.
        """
        folder, self._without_checksums = self._without_checksums, None
        if folder is not None and jax.process_index() == 0:
            try:
                write_checksums(folder, folder / STATE)
            except (OSError, ValueError) as error:
                raise self._unwritten(self._started, error) from error
            self._deleted = self._deleting.submit(self._delete_others, dict(self.losses))

    def _delete_others(self, losses: Mapping[int, float]) -> None:
        """Deletes those that are not kept; what cannot be deleted now, is after another save."""
        own = [step for step in self.steps() if obstacle(self.directory / str(step), self._run) is None]
        saved = {step: saved_time(self.directory / str(step)) for step in own}
        for step in {*own} - steps_to_keep(self.checkpoints, losses, saved, self.lacks_files) - self.copying:
            with suppress(OSError, CheckpointError):
                remove(self.directory / str(step), self._run)

    def close(self) -> None:
        """Waits as `wait` does, then closes the folder."""
        try:
            self.wait()
        except CheckpointError:
            time.sleep(SETTLE_SECONDS)
            raise
        finally:
            self._deleting.shutdown()
            with self._quiet:
                self._orbax.close()

    def _unwritten(self, step: int | None, why: Any) -> CheckpointError:
        latest = self.latest()
        before = "There is none before it" if latest is None else f"The last complete one is of step {latest}"
        help_ = f". {FREE_SPACE}" if is_full(why) else ""
        return CheckpointError(
            f"checkpoint {step} could not be written in {self.directory}: {str(why)[:300]}\n{before}{help_}"
        )


def _opened(directory: epath.Path, run: str | None) -> training.Checkpointer:
    """Orbax's, which deletes nothing."""
    try:
        if directory.exists() and jax.process_index() == 0:
            sweep(directory, run)
        return training.Checkpointer(directory)
    except OSError as error:
        raise CheckpointError(f"cannot store checkpoints in {directory}: {reason(error)}") from error


def _check_only_checkpoints(directory: epath.Path) -> None:
    """Raise `CheckpointError` for what has a step's name and is no checkpoint: one of that step could not be saved."""
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        if STEP.fullmatch(path.name) and not is_checkpoint(path):
            raise CheckpointError(
                f"{path} is no checkpoint of Axon's: move it elsewhere, so that steps can be saved there"
            )
