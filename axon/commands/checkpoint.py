"""`axon checkpoint`: look at, verify, compare and delete the checkpoints of a run."""

from contextlib import nullcontext
from typing import Annotated, Any

import typer

from axon.disk import locked, readable

app = typer.Typer(
    help="Look at, verify, compare and delete checkpoints.", no_args_is_help=True, rich_markup_mode="markdown"
)

Dir = Annotated[
    str, typer.Argument(metavar="DIR", help="The folder of a run, its checkpoints, or one of them; or a mirror's URL.")
]


@app.command("list")
def list_(folder: Dir) -> None:
    """Each checkpoint's step, size, date and condition; of the files only lengths are looked at.

    Example: `axon checkpoint list runs/quickstart`
    """
    from axon.checkpoint.inspect import entries, opened

    for one in entries(opened(folder)[0]):
        date = f"{one.saved:%Y-%m-%d %H:%M:%S}" if one.saved else "-"
        typer.echo(f"{one.name:>12}  {readable(one.size):>9}  {date:19}  {one.condition}")


@app.command()
def show(folder: Dir) -> None:
    """Every array of the latest checkpoint, or of the one at DIR: path, shape, dtype and bytes; and what else it has.

    Example: `axon checkpoint show runs/quickstart/checkpoints/200`
    """
    import math

    from axon.checkpoint.inspect import arrays, describe_extra

    reader, step = _one(folder)
    found, total = arrays(reader, step), 0
    width = max(map(len, found))
    for path, array in sorted(found.items()):
        size = math.prod(array.shape) * array.dtype.itemsize
        total += size
        shape = " × ".join(map(str, array.shape)) or "scalar"
        typer.echo(f"{path:{width}}  {shape:>20}  {array.dtype.name:>10}  {readable(size):>9}")
    typer.echo(f"step {step}: {len(found)} arrays, {readable(total)} before compression")
    for name, value in describe_extra(reader, step).items():
        typer.echo(f"{name}: {value}")


@app.command()
def diff(a: Dir, b: Dir) -> None:
    """The arrays in which two checkpoints differ, with the largest absolute and relative difference.

    Example: `axon checkpoint diff runs/a/checkpoints/200 runs/b`
    """
    from axon.checkpoint.inspect import difference

    one, other, count = _one(a), _one(b), 0
    for found in difference(one, other):
        count += 1
        most = f", at most {found.absolute:.3g}, relative {found.relative:.3g}" if found.absolute is not None else ""
        typer.echo(f"{found.path}: {found.how}{most}")
    typer.echo(
        f"step {one[1]} and step {other[1]}: {count or 'no'} array{'s'[: count != 1]} differ{'s' * (count == 1)}"
    )


@app.command()
def verify(folder: Dir) -> None:
    """Read every array of all checkpoints, or of the one at DIR, and compare every byte with what was saved.

    Exits with 2 if any is damaged.

    Example: `axon checkpoint verify runs/quickstart`
    """
    from axon.checkpoint.inspect import opened

    reader, step = opened(folder)
    bad = [one for one in ([step] if step is not None else reader.steps()) if not _verified(reader, one)]
    if bad:
        raise typer.Exit(2)


@app.command()
def prune(
    folder: Dir,
    keep: Annotated[int | None, typer.Option(min=1, help="Delete all before the latest so many intact ones.")] = None,
    steps: Annotated[str, typer.Option(metavar="N,N,…", help="Delete those of these steps.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only what would be deleted is said.")] = False,
) -> None:
    """Delete checkpoints: only with --yes, and never the last intact one. Every byte of those that are kept is read.

    Example: `axon checkpoint prune runs/quickstart --keep 1 --yes`
    """
    from axon.checkpoint.inspect import opened, to_prune
    from axon.checkpoint.ownership import remove
    from axon.checkpoint.remote import is_copy
    from axon.errors import UserError
    from axon.object_store import is_url
    from axon.run.folder import RunFolder

    numbers = [one.strip() for one in steps.split(",")] if steps else []
    if not all(one.isascii() and one.isdecimal() and len(one) < 19 for one in numbers):
        raise UserError(f"--steps is {steps!r}; expected numbers and commas, as 200,400")
    if keep is None and not numbers:
        raise UserError("nothing to delete: give --keep N, or --steps N,N,…")
    if is_url(folder):
        raise UserError(f"{folder} is a mirror: prune the run's own folder, which its copies follow at the next save")
    reader, _ = opened(folder)
    if is_copy(reader.directory.parent):
        where = reader.directory.parent
        raise UserError(f"{where} is a mirror: prune the run's own folder, which its copies follow at the next save")
    run = RunFolder(str(reader.directory.parent))
    lock = run.locked() if run.config.is_file() else locked(str(reader.directory))
    with lock if yes else nullcontext():
        whose = run.identifier() if run.id.is_file() else None
        gone, left = to_prune(reader, keep, [int(one) for one in numbers], whose)
        for line in left:
            typer.echo(line)
        for step in gone:
            typer.echo(f"{'deleting' if yes else 'would delete'} {reader.directory / str(step)}")
        for step in gone if yes else ():
            remove(reader.directory / str(step), whose)
    typer.echo(f"{len(gone) or 'no'} checkpoint{'s'[: len(gone) != 1]} {'deleted' if yes else 'to delete; add --yes'}")


def _one(folder: str) -> tuple[Any, int]:
    """The checkpoints of a folder, and the step meant: the folder's own, or the latest."""
    from axon.checkpoint.inspect import opened

    reader, step = opened(folder)
    return reader, reader.steps()[-1] if step is None else step


def _verified(reader: Any, step: int) -> bool:
    """Whether a checkpoint is intact, which is said."""
    from axon.checkpoint.inspect import arrays, problems

    found = problems(reader, step)
    for one in found:
        typer.echo(f"step {step}: damaged: {one}")
    if not found:
        typer.echo(f"step {step}: {len(arrays(reader, step))} arrays, every byte as it was saved")
    return not found
