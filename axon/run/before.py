"""Before a run begins: whether its checkpoints are its own and where they were, and no folder of it is in another."""

import re
from pathlib import Path

from axon.checkpoint import Reader
from axon.checkpoint.ownership import EXTRA, RUN, metadata
from axon.disk import overlap
from axon.errors import UserError
from axon.object_store import local_path
from axon.observe.lines import read_lines
from axon.run.folder import RunFolder
from axon.run.tree import Train


def check_separate_folders(train: Train, folder: RunFolder) -> None:
    """Raise `UserError` if what is saved or copied into one folder of a run would be deleted from another of its: the
    mirror is its folder, around it or in it; or the local folder is in the mirror or among its checkpoints."""
    mirror = None if train.mirror is None else local_path(train.mirror, "Checkpoints.mirror")
    if mirror is not None and overlap(mirror, folder.path):
        raise UserError(
            f"Checkpoints.mirror is {train.mirror!r}, and this run's folder is {folder.path}: neither may be in the "
            "other. Give another Checkpoints.mirror"
        )
    local = train.checkpoints.local_folder
    for place in (folder.checkpoints, mirror):
        if local is not None and place is not None and Path(local).resolve().is_relative_to(place.resolve()):
            raise UserError(
                f"Checkpoints.local_folder is {local!r}, in {place}, which has the durable checkpoints: give a folder "
                "of its own, as /dev/shm/axon"
            )


def check_own_checkpoints(train: Train, folder: RunFolder) -> None:
    """Raise `UserError` if another run's checkpoint is among those of this run, which could be resumed from it. One
    that was saved without a run's identifier may be anyone's, and is taken."""
    own = folder.identifier() if folder.id.is_file() else None
    for reader in (Reader(folder.checkpoints), folder.reader(train.checkpoints)):
        for step in reader.steps():
            saved = metadata(reader.directory / str(step))
            if saved.get(RUN) not in (None, own):
                config = re.search(r"^Train\.run_dir = (.*)$", str(saved.get(EXTRA, {}).get("config")), re.MULTILINE)
                raise UserError(
                    f"{reader.directory / str(step)} is of another run, {saved[RUN]}"
                    f"{f', with Train.run_dir = {config[1]}' if config else ''}; the run in {folder.path} is "
                    f"{own or 'a new one'}. Move it away; to begin with the state of another run, name its folder as "
                    "InitFrom.source, with InitFrom.optimizer = True"
                )


def check_not_lost(train: Train, folder: RunFolder) -> None:
    """Raise `UserError` if this run saved a checkpoint, by its events, and there is none any more: it would begin anew
    and cut its metrics back. Those of the local folder may be gone with its machine."""
    if folder.reader(train.checkpoints).latest() is not None:
        return
    steps, local = set[int | None](), False
    for event in read_lines(folder.events):
        if event.get("kind") == "save_begin":
            local = bool(event.get("local"))
        elif event.get("kind") == "save_end" and not local:
            steps.add(event.get("step"))
    if steps:
        raise UserError(
            f"{folder.events} says that checkpoints were saved, up to step {max(filter(None, steps), default=0)}, and "
            f"there is none in {folder.checkpoints}. Is a disk not mounted, or was it emptied? Put them back; or, "
            f"to begin anew on purpose, give another --run-dir, or move {folder.path} away"
        )
