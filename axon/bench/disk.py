"""Files of a benchmark, and the page cache that it wants them in or out of."""

import os
from pathlib import Path


def files_of(folder: Path) -> list[Path]:
    """All in a folder and those below it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def drop_cached(folder: Path) -> None:
    """Drops the files of a folder from the page cache. What is not yet on the disk stays there: flush it first."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
