"""`axon checkpoint`: look at, verify, compare and delete the checkpoints of a run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

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
        typer.echo(f"{one.name:>12}  {_size(one.size):>9}  {date:19}  {one.condition}")


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
        typer.echo(f"{path:{width}}  {shape:>20}  {array.dtype.name:>10}  {_size(size):>9}")
    typer.echo(f"step {step}: {len(found)} arrays, {_size(total)} before compression")
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
    keep: Annotated[int | None, typer.Option(min=1, help="Delete all but the latest so many.")] = None,
    steps: Annotated[str, typer.Option(metavar="N,N,…", help="Delete those of these steps.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only what would be deleted is said.")] = False,
) -> None:
    """Delete checkpoints: only with --yes, and never the last one.

    Example: `axon checkpoint prune runs/quickstart --keep 1 --yes`
    """
    from axon.checkpoint.inspect import opened, to_prune
    from axon.errors import UserError

    if not all(one.strip().isdecimal() for one in steps.split(",") if steps):
        raise UserError(f"--steps is {steps!r}; expected numbers and commas, as 200,400")
    reader, _ = opened(folder)
    with _locked(reader) if yes else nullcontext():
        for step in to_prune(reader, keep, [int(one) for one in steps.split(",") if one]):
            if yes:
                (reader.directory / str(step)).rmtree()
            typer.echo(f"{'deleted' if yes else 'would delete'} {reader.directory / str(step)}")


def _one(folder: str) -> tuple[Any, int]:
    """The checkpoints of a folder, and the step meant: the folder's own, or the latest."""
    from axon.checkpoint.inspect import opened

    reader, step = opened(folder)
    return reader, reader.steps()[-1] if step is None else step


def _verified(reader: Any, step: int) -> bool:
    """Whether a checkpoint is intact, which is said."""
    from axon.checkpoint import CheckpointError
    from axon.checkpoint.inspect import read_arrays

    found = reader.damage(step)
    try:
        count = 0 if found else sum(1 for _ in read_arrays(reader, step))
    except CheckpointError as error:
        found = [str(error).splitlines()[0]]
        count = 0
    for one in found or ():
        typer.echo(f"step {step}: damaged: {one}")
    if not found:
        how = "every byte as it was saved" if found is not None else "readable; saved without checksums"
        typer.echo(f"step {step}: {count} arrays, {how}")
    return not found


def _locked(reader: Any) -> AbstractContextManager[Any]:
    """The lock of the run whose checkpoints they are, so that none in use is deleted."""
    from axon.run.folder import RunFolder

    run = RunFolder(str(reader.directory.parent))
    return run.locked() if run.config.is_file() else nullcontext()


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
