"""Ownership of checkpoints: the one place that decides what may be deleted.

A checkpoint is known by what Axon wrote into it, not by its name: a folder `2019` may be anyone's. Deleted is only a
real folder of which every file is part of a checkpoint, saved by the run that deletes it or by one that is not known.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from etils import epath

from axon.checkpoint.compare import CheckpointError
from axon.disk import delete_own, foreign, free_name

METADATA = "_CHECKPOINT_METADATA"
STATE = "state"
EXTRA = "extra"
RUN = "run"
"""In a checkpoint's own metadata: the identifier of the run that saved it."""
CHECKSUMS = "checksums.json"
"""The file, beside the state's folder, with the checksums of what was written last."""
PARTS = "checksums"
"""The folder, within that of the state, with one file for each process that saved."""
STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_TEMPORARY = r"\.orbax-checkpoint-tmp[^/]*"
_REMAINS = re.compile(rf"(?:{STEP.pattern}){_TEMPORARY}")
_FILE = re.compile(
    rf"{METADATA}|{re.escape(CHECKSUMS)}|commit_success\.txt|{STATE}/(?:_METADATA|_sharding|commit_success\.txt"
    rf"|array_metadatas/process_\d+|{PARTS}/process_\d+\.json"
    r"|(?:ocdbt\.process_\d+/)?(?:manifest\.ocdbt|d/[0-9a-f]{32}))"
)


def is_file_of_checkpoint(path: str) -> bool:
    """Whether a file of this path below a checkpoint's folder is part of it, also while it is written."""
    return _FILE.fullmatch(re.sub(_TEMPORARY, "", path).removesuffix(".__lock")) is not None


def is_checkpoint(folder: epath.PathLike) -> bool:
    """Whether a folder named by a step has a checkpoint that Axon saved, damaged or not; it may be a link to one."""
    folder = epath.Path(folder)
    if not STEP.fullmatch(folder.name) or not folder.is_dir():
        return False
    state = folder / STATE
    written = (state / PARTS).is_dir() or (state.is_dir() and (folder / CHECKSUMS).is_file())
    return written or isinstance(metadata(folder).get(EXTRA), dict)


def metadata(folder: epath.PathLike) -> dict[str, Any]:
    """The metadata that Axon wrote into a checkpoint; empty if it is missing or damaged."""
    try:
        content = json.loads((epath.Path(folder) / METADATA).read_text())["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def obstacle(folder: epath.PathLike, run: str | None = None) -> str | None:
    """Why `run` may not delete what is at `folder`, the checkpoint of a step; None: it may."""
    path = Path(folder)
    if path.is_symlink():
        return "it is a link"
    if not is_checkpoint(path):
        return "it is no checkpoint of Axon's"
    if name := foreign(path, is_file_of_checkpoint):
        return f"{name} in it is no part of a checkpoint"
    return None if _may_be_of(path, run) else "it is another run's"


def remove(folder: epath.PathLike, run: str | None = None) -> None:
    """Deletes the checkpoint at `folder`. Raises `CheckpointError`, and deletes nothing, if there is an `obstacle`.

    It is renamed first: what a kill leaves of it is not a checkpoint that lacks files, and `sweep` deletes it.
    """
    if why := obstacle(folder, run):
        raise CheckpointError(f"{folder} is not deleted: {why}")
    path = Path(folder)
    shutil.rmtree(path.rename(free_name(path, ".orbax-checkpoint-tmp")))


def is_remains(folder: epath.PathLike) -> bool:
    """Whether a folder is what a killed save or deletion left, and nothing else is in it."""
    path = Path(folder)
    return _REMAINS.fullmatch(path.name) is not None and foreign(path, is_file_of_checkpoint) is None


def sweep(directory: epath.PathLike, run: str | None = None) -> None:
    """Deletes what killed saves and deletions left in the folder of `run`, which is not saving."""
    for path in sorted(Path(directory).iterdir()):
        if is_remains(path) and _may_be_of(path, run):
            delete_own(path, is_file_of_checkpoint)


def _may_be_of(folder: Path, run: str | None) -> bool:
    return run is None or metadata(folder).get(RUN) in (None, run)
