"""Saving checkpoints while training goes on."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from etils import epath

from axon.checkpoint.checksums import write_part, write_seal
from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import Checkpoints, kept
from axon.checkpoint.orbax import ArrayTree, saving, training
from axon.checkpoint.quiet import quiet_log
from axon.checkpoint.reader import EXTRA, STATE, UNPADDED, Reader
from axon.checkpoint.set_aside import newest_intact
from axon.checkpoint.tree import flat, nested, storable, unpadded
from axon.checkpoint.verify import CHECKSUMS
from axon.runtime.stored import is_stored

T = TypeVar("T")


class Store(Reader):
    """The checkpoints of the one run that writes into `directory`, which is created if missing.

    Opening it deletes the remains of a killed save (in the background, before the first save), so only the run itself
    may open a `Store`; all others open a `Reader`. A context manager; closing waits for the save in progress.

    Loading the `newest` sets damaged ones aside, under another name; `notices` has a line about each.

    `losses`: for `Checkpoints.keep_best`, the held-out loss of steps, to be filled in as they become known.
    `copying`: steps that are not deleted as long as they are in it.
    """

    def __init__(self, directory: epath.PathLike, checkpoints: Checkpoints):
        super().__init__(directory)
        self.checkpoints = checkpoints
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"cannot store checkpoints in {self.directory}: it is not a folder")
        self.notices: list[str] = []
        self.losses: dict[int, float] = {}
        self.copying: set[int] = set()
        self._orbax = _opened(self.directory, kept(checkpoints, self.losses, self.copying))
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet_log())
        self._started = self.latest()
        self._unsealed: epath.Path | None = None
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
        content = {EXTRA: dict(extra), CHECKSUMS: True} | ({UNPADDED: shapes} if shapes else {})
        content = json.loads(json.dumps(content))  # as it will be read; fails before anything is written
        arrays = nested({path: storable(path, leaf) for path, leaf in flat(state).items()})
        in_files = any(map(is_stored, flat(state).values()))
        checksum = partial(write_part, process=jax.process_index(), processes=jax.process_count(), content=content)
        self.wait()
        try:
            with saving():
                self._begun = self._orbax.save_checkpointables_async(
                    step, {STATE: ArrayTree(arrays, checksum)}, force=True, custom_metadata=content
                )
        except (OSError, ValueError) as error:
            raise self._unwritten(step, error) from error
        if self._begun is None:
            raise self._unwritten(step, "Orbax declined to save")
        self._started, self._unsealed = step, self.directory / str(step)
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
            raise self._unwritten(self._started, error) from error
        self.seal()

    def seal(self) -> None:
        """Adds the checksums of what Orbax wrote last of the checkpoint that was saved last, and is now complete.

        Raises `CheckpointError` if they cannot be written.
        """
        folder, self._unsealed = self._unsealed, None
        if folder is not None and jax.process_index() == 0:
            try:
                write_seal(folder, folder / STATE)
            except (OSError, ValueError) as error:
                raise self._unwritten(self._started, error) from error

    def close(self) -> None:
        """Waits as `wait` does, then closes the folder."""
        try:
            self.wait()
        finally:
            with self._quiet:
                self._orbax.close()

    def _unwritten(self, step: int | None, why: Any) -> CheckpointError:
        latest = self.latest()
        before = "There is none before it" if latest is None else f"The last complete one is of step {latest}"
        return CheckpointError(
            f"checkpoint {step} could not be written in {self.directory}: {str(why)[:300]}\n{before}. Is the disk full?"
        )


def _opened(directory: epath.Path, policy: Any) -> training.Checkpointer:
    try:
        return training.Checkpointer(directory, preservation_policy=policy, cleanup_tmp_directories=True)
    except OSError as error:
        raise CheckpointError(f"cannot store checkpoints in {directory}: {error}") from error
