"""Checksums of every byte of a checkpoint, made while it is saved.

Each process writes those of its own files, process 0 also those of what the processes share, before the checkpoint
counts as complete. What Orbax writes at that moment itself, a time and markers, is added just after it.

CRC-32, which detects every single flipped bit and every damaged run of up to 32 bits for certain, and any other damage
but for one in 2^32. `isal` computes what `zlib` does, ten times as fast: reading takes longer than that.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import tensorstore as ts
from etils import epath
from isal.isal_zlib import crc32

from axon.checkpoint.ownership import CHECKSUMS, PARTS
from axon.signed_json import signed, unsigned

INDEX = "small arrays and the index of all"
THREADS = max(4, os.cpu_count() or 1)
_PIECE = 2**20  # fits in a core's own cache
_OWN = re.compile(r"ocdbt\.process_(\d+)")


class Segment(NamedTuple):
    """A run of bytes of a file: how many, their CRC-32, and the array that they are data of, if any."""

    size: int
    crc32: int
    array: str | None


class Span(NamedTuple):
    """Where a segment is: in which file, from which byte on."""

    file: epath.Path
    start: int
    size: int


Files = dict[str, list[Segment]]
"""By path within a folder (of the state for a part, of the checkpoint for what Orbax writes last) a whole file's
segments."""


def write_part(state: epath.Path, process: int, processes: int, content: Any) -> None:
    """Writes the checksums of those files in the folder `state` that belong to a process, once all are written.

    `content`: what is saved with the arrays as the checkpoint's own metadata.
    """
    owned = [path for path in files_below(state) if _owner(path.relative_to(state).parts[0]) == process]
    arrays: dict[epath.Path, list[tuple[int, int, str]]] = {}
    for folder in (path.parent for path in owned if path.name == "manifest.ocdbt"):
        arrays |= _arrays_in(folder)
    part = {"processes": processes, "files": checksums(state, owned, arrays)}
    if process == 0:
        part["content"] = content_crc32(content)
    (state / PARTS).mkdir(exist_ok=True)
    part_file(state, process).write_text(signed(part))


def part_file(state: epath.Path, process: int) -> epath.Path:
    """The file with the checksums of what a process has written."""
    return state / PARTS / f"process_{process}.json"


def write_checksums(folder: epath.Path, state: epath.Path) -> None:
    """Writes the checksums of the files in a complete checkpoint's `folder` that no part has."""
    parts = [path for path in files_below(state) if path.parent.name == PARTS]
    known = {state / name for path in parts for name in unsigned(path.read_text())["files"]}
    left = [path for path in files_below(folder) if path not in known and path.name != CHECKSUMS]
    (folder / CHECKSUMS).write_text(signed({"files": checksums(folder, left, {})}))


def checksums(
    root: epath.Path, files: Iterable[epath.Path], arrays: Mapping[epath.Path, list[tuple[int, int, str]]]
) -> Files:
    """The segments of each of `files`; `arrays`: (first byte, bytes, array) of those that hold the data of some."""
    spans = [(span, array) for path in files for span, array in _spans(path, arrays.get(path, []))]
    found: Files = {}
    with ThreadPoolExecutor(THREADS) as threads:
        for (span, array), value in zip(spans, threads.map(crc32_of, [span for span, _ in spans]), strict=True):
            found.setdefault(str(span.file.relative_to(root)), []).append(Segment(span.size, value, array))
    return found


def crc32_of(span: Span) -> int:
    """The CRC-32 of a span. Raises `EOFError` if the file is too short for it."""
    value, left = 0, span.size
    buffer = memoryview(bytearray(min(left, _PIECE)))
    with span.file.open("rb") as file:
        file.seek(span.start)
        while left:
            size = file.readinto(buffer[:left])  # type: ignore[attr-defined]  # of every binary file
            if not size:
                raise EOFError
            value, left = crc32(buffer[:size], value), left - size
    return value


def content_crc32(content: Any) -> int:
    """The CRC-32 of a JSON value, however it is spelt."""
    return crc32(json.dumps(content, sort_keys=True).encode())


def _owner(name: str) -> int:
    """The process that writes below a folder of this name; what no process has for itself is process 0's."""
    own = _OWN.match(name)
    return int(own[1]) if own else 0


def files_below(folder: epath.Path) -> list[epath.Path]:
    """All files of a folder and those in it, sorted."""
    found = []
    for path in sorted(folder.iterdir()):
        found += files_below(path) if path.is_dir() else [path]
    return found


def _spans(path: epath.Path, arrays: Iterable[tuple[int, int, str]]) -> Iterator[tuple[Span, str | None]]:
    """The spans of a whole file: those that are data of an array, and what is between them."""
    end = 0
    for start, size, array in sorted(arrays):
        if start > end:
            yield Span(path, end, start - end), None
        yield Span(path, start, size), array
        end = start + size
    if (size := path.stat().length) > end:
        yield Span(path, end, size - end), None


def _arrays_in(folder: epath.Path) -> dict[epath.Path, list[tuple[int, int, str]]]:
    """Where the data of arrays are in the files of an OCDBT database: by file (first byte, bytes, array).

    Its index has one node: Orbax allows nodes of 100 MB. In it are also the data of arrays below 1 KiB.
    """
    base: Any = str(folder) if "://" in str(folder) else {"driver": "file", "path": f"{folder}/"}
    store = ts.KvStore.open(base).result()
    root = ts.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]
    found: dict[epath.Path, list[tuple[int, int, str]]] = {}
    for place, name in [(root, INDEX), *_named(ts.ocdbt.dump(store, root).result()["entries"])]:
        _, parent, file, start, size = place.split(":")
        found.setdefault(folder / parent / file, []).append((int(start), int(size), name))
    return found


def _named(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Where the data are that are not in the index itself, and the path of their array."""
    for entry in entries:
        if "indirect_value" in entry:
            yield entry["indirect_value"], entry["key"].decode().partition("/")[0].replace(".", "/")
