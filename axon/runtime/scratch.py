"""A folder of files for arrays that do not fit in memory, for as long as a process lives.

Not a checkpoint: nothing in it outlives the process, nor is it synchronised to the disk.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from axon.disk import delete_own, is_array_file, named, readable, writing
from axon.errors import UserError

PREFIX = "axon-scratch-"


class Scratch:
    """A folder of this process's own within `Execution.disk[kind]`, made when it is first needed, deleted at the end.

    Folders of processes that were killed are deleted first: their locks are free.

    Args:
        kind: of the arrays. folder: as the layout gives it. needed: bytes that the arrays take.
    """

    def __init__(self, kind: str, folder: str, needed: int):
        self.where = f"Execution.disk[{kind!r}]"
        self.parent, self.needed = named(folder, self.where), needed

    @cached_property
    def path(self) -> Path:
        """The folder. Raises `UserError` if it cannot be written, or has too little space."""
        if not self.parent.is_dir():  # not created: what is missing may be the disk
            raise UserError(f"{self.where}: there is no folder {self.parent}. Create it, or name another")
        advice = f"Set {self.where} to a folder on a local disk that you can write"
        with writing(self.parent, advice):
            _delete_abandoned(self.parent)
            self._check_space()
            made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self.parent))
            with suppress(OSError):  # a file system without locks, where nothing is deleted
                weakref.finalize(self, os.close, _lock(made))
            path = made.rename(self.parent / made.name[1:])  # locked before others may take it for abandoned
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)  # made above
        return path

    def claim(self) -> None:
        """Create the folder now. Raises as `path` does."""
        assert self.path

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.parent).free
        if free < self.needed:
            raise UserError(
                f"{self.where} = {str(self.parent)!r} has {readable(free)} free, and {readable(self.needed)} are "
                "needed. Free some space, or name a folder on a larger disk"
            )

    @cached_property
    def context(self) -> Any:
        """TensorStore's, for all arrays: no cache of its own, and no waiting for the disk at each file."""
        import tensorstore

        return tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})


def _lock(folder: Path) -> int:
    """The folder, opened and locked; raises `OSError` where another process has it locked, or it cannot be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _delete_abandoned(parent: Path) -> None:
    """Delete the folders of processes that have ended: those that can be locked."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, UserError):  # what is locked, or not all ours, stays
            descriptor = _lock(folder)
            try:
                delete_own(folder, is_array_file)
            finally:
                os.close(descriptor)
