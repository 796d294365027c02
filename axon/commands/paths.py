"""Paths on the command line: what each has as its `parser`, and the argument that names a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from axon.disk import as_path
from axon.errors import UserError

RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="The folder of a run, its URL in an object store, or hf:DIR_OR_NAME.")
]


def path(text: str) -> Path:
    """A path, with `~` and `$NAME` expanded: a shell leaves those of `--out=~/x` and of quoted text as they are."""
    try:
        return Path(as_path(text, "the path"))
    except UserError as error:
        raise typer.BadParameter(str(error)) from None  # to which typer adds the option's name
