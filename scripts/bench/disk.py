"""The page cache, which a benchmark wants files out of."""

import os
from pathlib import Path

from etils import epath

from axon.checkpoint.checksums import files_below


def drop_cached(folder: Path) -> None:
    """Drops the files of a folder from the page cache. What is not yet on the disk stays there: flush it first."""
    for path in files_below(epath.Path(folder)):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
