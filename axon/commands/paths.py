"""What every option and argument of the command line that is a path has as its `parser`."""

from pathlib import Path

import typer

from axon.disk import as_path
from axon.errors import UserError


def path(text: str) -> Path:
    """A path, with `~` and `$NAME` expanded: a shell leaves those of `--out=~/x` and of quoted text as they are."""
    try:
        return Path(as_path(text, "the path"))
    except UserError as error:
        raise typer.BadParameter(str(error)) from None  # to which typer adds the option's name
