"""The content of a folder of checkpoints: for people who look at, compare and delete them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jax
import numpy as np
from etils import epath

from axon.checkpoint.checksums import files_below
from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import latest_intact
from axon.checkpoint.ownership import STATE, STEP, is_checkpoint, is_remains, obstacle
from axon.checkpoint.reader import Reader
from axon.checkpoint.remote import COMPLETE, fetched_run, is_copy
from axon.checkpoint.verify import saved_time, wrong_lengths
from axon.disk import named
from axon.object_store import is_url


@dataclass(frozen=True)
class Entry:
    """A folder among the checkpoints: its name, bytes, when it was complete, and in a word how it is."""

    name: str
    size: int
    saved: datetime | None
    condition: str


@dataclass(frozen=True)
class Difference:
    """One array of two checkpoints that is not the same: how, and by how much at most where both can be compared."""

    path: str
    how: str
    absolute: float | None = None
    relative: float | None = None


def opened(path: str) -> tuple[Reader, int | None]:
    """The checkpoints at `path`, and the step if it is the folder of one: that, their folder, or that of a run.

    Of a mirror's URL, the newest one, fetched into Axon's cache. Raises `CheckpointError` if there are none.
    """
    if is_url(path):
        path = str(fetched_run(path, "the folder of checkpoints"))
    folder = epath.Path(named(path, "the folder of checkpoints"))
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    reader, step = (Reader(folder.parent), int(folder.name)) if is_checkpoint(folder) else (Reader(folder), None)
    if not reader.steps():
        raise CheckpointError(f"no checkpoint in {path}; expected the folder of a run, its checkpoints, or one of them")
    return reader, step


def entries(reader: Reader) -> list[Entry]:
    """All folders of checkpoints, complete ones first; of their files only lengths are looked at.

    An empty folder named by a step, which deleting from a mirror once left, is none.
    """
    complete = [str(step) for step in reader.steps()]
    folders = sorted(path for path in reader.directory.iterdir() if path.is_dir() and path.name not in complete)
    others = [_entry(path, _other(path)) for path in folders if not STEP.fullmatch(path.name) or files_below(path)]
    return [_entry(folder, _condition(folder)) for folder in map(reader.directory.__truediv__, complete)] + others


def _entry(folder: epath.Path, condition: str) -> Entry:
    size = sum(path.stat().length for path in files_below(folder))
    saved = saved_time(folder)
    return Entry(folder.name, size, datetime.fromtimestamp(saved / 1e9) if saved else None, condition)


def _other(folder: epath.Path) -> str:
    if ".damaged" in folder.name:
        return "damaged, set aside"
    return "not complete: a save in progress, or killed" if is_remains(folder) else "no checkpoint of Axon's"


def _condition(folder: epath.Path) -> str:
    if is_copy(folder.parent.parent) and not any((folder.parent.parent / COMPLETE).glob(f"{folder.name}-*.json")):
        return "not complete: a copy in progress, or killed"
    found = wrong_lengths(folder, STATE)
    return f"damaged: {found[0]}" if found else "complete"


def arrays(reader: Reader, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each array saved at `step`, by path, as they are on disk."""
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in reader.saved_leaves(step).items()}


def read_arrays(reader: Reader, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """Each array saved at `step`, one in memory at a time. Raises `CheckpointError` for one that cannot be read."""
    for path, abstract in arrays(reader, step).items():
        yield path, reader.load_leaf(step, path, abstract)


def difference(one: tuple[Reader, int], other: tuple[Reader, int]) -> Iterator[Difference]:
    """The arrays in which two checkpoints differ; two arrays are in memory at a time."""
    (a, step_a), (b, step_b) = one, other
    of_a, of_b = arrays(a, step_a), arrays(b, step_b)
    for path in sorted({*of_a, *of_b}):
        if path not in of_a or path not in of_b:
            yield Difference(path, f"only in the {'first' if path in of_a else 'second'}")
        elif of_a[path].shape != of_b[path].shape:
            yield Difference(path, f"shape {of_a[path].shape} and {of_b[path].shape}")
        else:
            x, y = a.load_leaf(step_a, path, of_a[path]), b.load_leaf(step_b, path, of_b[path])
            yield from _compared(path, x, y)


def _compared(path: str, a: np.ndarray, b: np.ndarray) -> Iterator[Difference]:
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return
    how = "values" if a.dtype == b.dtype else f"dtype {a.dtype} and {b.dtype}"
    x, y = a.astype(np.float64), b.astype(np.float64)
    off, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    relative = np.divide(off, size, out=np.zeros_like(off), where=size > 0)
    yield Difference(path, how, float(off.max(initial=0)), float(relative.max(initial=0)))


def problems(reader: Reader, step: int) -> list[str]:
    """Faults of the checkpoint of `step`, of which every byte is read; empty if nothing is."""
    if found := reader.damage(step):
        return [str(one) for one in found]
    try:
        for _ in read_arrays(reader, step):
            pass
    except CheckpointError as error:
        return [str(error).splitlines()[0]]
    return []


def to_prune(reader: Reader, keep: int | None, steps: Sequence[int], run: str | None) -> tuple[list[int], list[str]]:
    """The steps to delete: `steps`, and if `keep` is given all before the latest so many that are intact.

    And a line about each damaged one that is left among those. `run`: whose checkpoints may be deleted, if known.

    Raises `CheckpointError` for a step that is not there, one that may not be deleted, or if no intact one is left.
    """
    found, left = reader.steps(), dict[int, str]()
    if missing := [step for step in steps if step not in found]:
        raise CheckpointError(f"no checkpoint of step {missing[0]} in {reader.directory}; there are {found}")

    def damaged(step: int) -> bool:
        if step not in left and (wrong := problems(reader, step)):
            left[step] = f"{reader.directory / str(step)} is left, and not counted: it is damaged: {wrong[0]}"
        return step in left

    rest = [step for step in found if step not in steps]
    kept = latest_intact(rest, 1 if keep is None else keep, damaged)
    gone = sorted({*steps, *(rest if keep is not None else ())} - kept)
    if gone and not kept - left.keys():
        raise CheckpointError(f"that would delete every intact checkpoint in {reader.directory}; keep at least one")
    for step in gone:
        if why := obstacle(reader.directory / str(step), run):
            raise CheckpointError(f"{reader.directory / str(step)} is not deleted: {why}. Nothing was deleted")
    return gone, [left[step] for step in sorted(left)]


def describe_extra(reader: Reader, step: int) -> dict[str, Any]:
    """All that is saved besides the arrays, without the text of the configuration."""
    return {name: value for name, value in reader.extra(step).items() if name != "config"}
