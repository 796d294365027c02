"""A run whose checkpoints are copied elsewhere, so that the same command goes on with it on another machine."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from axon.checkpoint import CheckpointError, RunStore
from axon.checkpoint.mirror import Mirror, owner
from axon.checkpoint.remote import FILES, Copy, Fetched, Remote, is_part_of_copy
from axon.disk import delete_own, writing
from axon.errors import UserError
from axon.launch.agree import process_0_first
from axon.launch.signals import Interrupted
from axon.launch.watchdog import Watchdog
from axon.observe.events import Events
from axon.run.folder import RunFolder
from axon.run.tree import Train

WHERE = "Checkpoints.mirror"
Report = Callable[[str], None]


def fetched(train: Train, folder: RunFolder, report: Report) -> "Mirrored | None":
    """Where a run's checkpoints are copied to, if anywhere, after newer ones than in its folder were fetched."""
    if train.mirror is None:
        return None
    if train.mirror == train.run_dir:
        report(f"{train.run_dir} is a copy of {folder.path}")
    mirrored = Mirrored(train.mirror, folder, report)
    mirrored.fetch(train)
    return mirrored


class Mirrored:
    """`Checkpoints.mirror` of a run. Of several processes, process 0 has one."""

    def __init__(self, location: str, folder: RunFolder, report: Report):
        self._remote, self._folder, self._report = Remote(location, WHERE), folder, report
        self._owner = owner()
        self._fetched: Fetched | None = None

    def fetch(self, train: Train) -> None:
        """Takes over the mirror, and gets its newest intact checkpoint if that is newer than those of the run's folder.

        Raises `UserError` if it has anything but a copy of this run, as the folder and `train` say what it is, or
        cannot be read and written.
        """
        latest = self._folder.reader(train.checkpoints).latest()
        with self._folder.locked(), self._aside() as aside:
            copies = self._copies(aside, train)
            self._remote.claim(self._owner)
            newer = [copy for copy in copies if latest is None or copy.step > latest]
            if newer:
                self._fetched = self._remote.fetch_newest(newer, aside.path, self._report)
                self._take(aside, latest)

    def _copies(self, aside: RunFolder, train: Train) -> list[Copy]:
        """The complete checkpoints there, after it was seen that all that is there is a copy of this run."""
        if name := self._remote.foreign():
            raise UserError(
                f"{WHERE} is {self._remote.location!r}, which has {name}, and is no copy that a run made of itself: "
                "copying would overwrite and delete what is there. Give an empty folder, or that of this run's copy"
            )
        copies = self._remote.copies()
        self._remote.fetch_files(aside.path)
        if aside.config.is_file():
            self._check_same_run(aside, train)
        elif copies:
            raise UserError(
                f"{WHERE} is {self._remote.location!r}, which has checkpoints and no config.gin: whose they are is not "
                f"known. Give another {WHERE}"
            )
        return copies

    def copying(self, store: RunStore, events: Events) -> Mirror:
        """The copying of what `store` saves; records what was fetched."""
        if self._fetched is not None:
            copy, size, seconds, damaged = self._fetched
            events.record("fetched", copy.step, seconds=seconds, bytes=size, damaged=list(damaged))
        return Mirror(self._remote, self._owner, self._folder.path, store, events.record, self._report)

    @contextmanager
    def _aside(self) -> Iterator[RunFolder]:
        """A folder within that of the run, for what is fetched; remains of a killed process are deleted."""
        aside = RunFolder(self._folder.path / "fetching", self._remote.location)
        with writing(aside.path):
            if aside.path.exists() or aside.path.is_symlink():
                delete_own(aside.path, is_part_of_copy)
            aside.path.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside.path, ignore_errors=True)  # made above

    def _check_same_run(self, aside: RunFolder, train: Train) -> None:
        aside.check_continues(train)
        if self._folder.trained() and self._folder.identifier() != aside.identifier():
            raise UserError(
                f"{WHERE} is {self._remote.location!r}, which has another run than {self._folder.path}, of the same "
                f"configuration. Give another {WHERE}, or another --run-dir to go on with the run that is there"
            )

    def _take(self, aside: RunFolder, latest: int | None) -> None:
        """Moves what was fetched into the run's folder, the checkpoint last: after a kill it is fetched again."""
        if self._fetched is None:
            if latest is None:
                raise CheckpointError(
                    f"every checkpoint in {self._remote.location} is damaged. To begin anew, give another {WHERE}"
                )
            return
        copy: Copy = self._fetched.copy
        with writing(self._folder.path):
            for name in FILES:
                if (aside.path / name).exists():
                    os.replace(aside.path / name, self._folder.path / name)
            self._folder.checkpoints.mkdir(exist_ok=True)
            os.replace(aside.path / copy.below, self._folder.path / copy.below)


@contextmanager
def copying(
    train: Train, mirrored: Mirrored | None, store: RunStore, events: Events, watchdog: Watchdog
) -> Iterator[Mirror | None]:
    """The copying of what `store` saves, in process 0, where `mirrored` is; all processes wait for the last copy."""
    if train.mirror is None:
        yield None
        return
    with _leaving_together(), mirrored.copying(store, events) if mirrored else nullcontext() as mirror:
        try:
            yield mirror
        finally:
            watchdog.enter("end")  # which may take as long as a save


@contextmanager
def _leaving_together() -> Iterator[None]:
    """Of several processes the others stay until process 0 has left the body too, unless the run fails."""
    try:
        yield
    except Interrupted:
        with process_0_first("copied"):
            pass
        raise
    with process_0_first("copied"):
        pass
