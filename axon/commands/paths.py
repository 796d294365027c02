"""Paths on the command line: what each has as its `parser`, and the argument that names a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from axon.disk import as_path
from axon.errors import UserError

RunDir = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR",
        help="The folder of a run, its URL in an object store, or hf:DIR_OR_NAME; RUN_DIR:NAME: one of its adapters.",
    ),
]


def named_paths(given: Sequence[str], option: str) -> dict[str, str]:
    """Name → path, of what is given to an option as NAME=PATH. Raises `UserError` for what is not, or a name twice."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, location = one.partition("=")
        if not (name and equals and location):
            raise UserError(f"{option} is {one!r}; expected NAME=PATH, as sql=runs/sql")
        if name in found:
            raise UserError(f"{option} has the name {name!r} twice; give each adapter a name of its own")
        found[name] = location
    return found


def path(text: str) -> Path:
    """A path, with `~` and `$NAME` expanded: a shell leaves those of `--out=~/x` and of quoted text as they are."""
    try:
        return Path(as_path(text, "the path"))
    except UserError as error:
        raise typer.BadParameter(str(error)) from None  # to which typer adds the option's name
