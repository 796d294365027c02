"""What every option and argument of the command line that is a path has as its `parser`."""

from pathlib import Path

from axon.disk import as_path


def path(text: str) -> Path:
    """A path, with `~` and `$NAME` expanded: a shell leaves those of `--out=~/x` and of quoted text as they are."""
    return Path(as_path(text, "the path"))
