"""`axon profile`: where the time of a training step goes on the devices that are here."""

import json
import sys
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from axon.commands.options import Json, Planned, Set
from axon.commands.paths import path
from axon.disk import output
from axon.errors import UserError

STEPS = 3

Source = Annotated[
    Path,
    typer.Argument(parser=path, metavar="CONFIG", help="A .gin file; or the folder of a run that traced some steps."),
]
Steps = Annotated[int | None, typer.Option(min=1, max=1000, help=f"How many steps to trace; {STEPS} by default.")]
To = Annotated[
    Path | None,
    typer.Option(
        parser=path, metavar="DIR", help="Keep the trace in this new folder: profile/, for XProf and Perfetto."
    ),
]

Page = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="FILE.html", help="Write the tables, the prediction beside them, as a page."),
]

say = partial(typer.echo, err=True)


def profile(
    config: Source,
    set_: Set = [],  # noqa: B006 - typer reads it, nothing writes it
    plan: Planned = None,
    steps: Steps = None,
    to: To = None,
    page: Page = None,
    json_: Json = False,
) -> None:
    """Where a training step's time goes, measured on the devices here: by module, kind of operation and mesh axis,
    beside the planner's prediction.

    Trains a few steps and keeps no checkpoint. Within a run: `axon train CONFIG --profile FIRST:LAST`.

    Example: `axon profile configs/quickstart.gin`, `axon profile runs/quickstart`
    """
    from axon.run.profiling import read_profile
    from axon.show.profile import predicted_here, print_profile, profile_json, write_profile_page

    page = page and output(page, "--page", ".html", ".htm")
    with ExitStack() as stack:
        if config.is_dir():
            if set_ or plan is not None or steps is not None or to is not None:
                raise UserError(f"{config} is the folder of a run: leave out --set, --plan, --steps and --to")
            folder, tree = _of_run(config)
        else:
            folder, tree = _trained(config, set_, plan, steps or STEPS, to, stack)
        found = read_profile(folder)
    predicted = predicted_here(tree, say)
    if page is not None:
        write_profile_page(page, f"a step of {config}", *found, predicted)
    if json_:
        typer.echo(json.dumps(profile_json(*found, predicted)))
    else:
        print_profile(*found, predicted)


def _of_run(run_dir: Path) -> tuple[Path, Any]:
    """The profile of a run, and its configuration."""
    from axon.run.folder import RunFolder

    folder = RunFolder.existing(run_dir)
    return folder.profile, folder.tree()


def _trained(
    config: Path, set_: list[str], plan: Path | None, steps: int, to: Path | None, stack: ExitStack
) -> tuple[Path, Any]:
    """The profile of a new run, and its configuration."""
    from axon.config import load
    from axon.run.profiled import profiled

    tree = load(config, set_, plan=plan).tree
    folder = to or Path(stack.enter_context(TemporaryDirectory(prefix="axon-profile-")))
    with redirect_stdout(sys.stderr):
        traced = profiled(tree, steps, folder, say)
    if to is not None:
        say(f"XProf: xprof {traced}; Perfetto: open the .trace.json.gz below it at https://ui.perfetto.dev")
    return traced, tree
