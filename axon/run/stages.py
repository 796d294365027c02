"""Runs that a run begins with, or has beside it, of the same configuration: they are carried out before it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from axon.errors import UserError, suggest
from axon.run.init_from import InitFrom
from axon.run.tree import Reference, Train

PREFIX = "stage:"
"""Of a location: then follows the name of one of `Train.stages`."""


def with_stages_done(train: Train, check: Callable[[Train], Any], carry_out: Callable[[Train], Any]) -> Train:
    """`train` without its stages, each carried out or continued before, and named by its folder where it was by
    `stage:NAME`. A stage's folder is its `run_dir`, by default the folder NAME in that of `train`.

    Before the first of them all are given to `check`, and what follows them: a mistake in that costs nothing. Raises
    `UserError` for a name of no stage, and for two runs of one folder.
    """
    stages = {name: replace(one, run_dir=one.run_dir or str(train.folder / name)) for name, one in train.stages.items()}
    folders = {name: one.run_dir for name, one in stages.items()}
    _check_folders(folders, train.run_dir)
    begun, references = train.init_from, train.references
    if isinstance(begun, InitFrom):
        begun = replace(begun, source=_folder(begun.source, folders, "InitFrom.source"))
    elif begun is not None:
        begun = _folder(begun, folders, "Train.init_from")
    references = {
        name: replace(one, source=_folder(one.source, folders, f"Train.references[{name!r}].source"))
        if isinstance(one, Reference)
        else one
        for name, one in references.items()
    }
    last = replace(train, stages={}, init_from=begun, references=references)
    for one in (*stages.values(), last) if stages else ():
        check(one)
    for stage in stages.values():
        carry_out(stage)
    return last


def _check_folders(folders: Mapping[str, Any], last: str | None) -> None:
    """Raise `UserError` for a stage whose folder is another's, or that of the run that follows, `last`."""
    counts = Counter([*folders.values(), last])
    if name := next((name for name, folder in folders.items() if counts[folder] > 1), None):
        raise UserError(
            f"the stage {name!r} and another run have one folder, {folders[name]!r}: Train.run_dir, as it is set, is "
            f"of each Train that has none of its own. Give --run-dir in its place, or set it for the stage too, as "
            f"{name}/Train.run_dir"
        )


def _folder(source: str, folders: Mapping[str, Any], where: str) -> str:
    name = source.removeprefix(PREFIX)
    if name == source:
        return source
    if name not in folders:
        raise UserError(f"{where} is {source!r}, and Train.stages has no {name!r}.{suggest(name, folders)}")
    return folders[name]
