"""Whether a checkpoint is as it was saved: every byte of it, against its checksums."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from axon.checkpoint.checksums import INDEX, THREADS, Segment, Span, content_crc32, crc32_of, part_file
from axon.checkpoint.ownership import CHECKSUMS, METADATA, PARTS, STATE, metadata
from axon.signed_json import unsigned


def saved_time(folder: epath.Path) -> int:
    """When a complete checkpoint was saved, in nanoseconds since 1970; 0 if its metadata are gone or damaged."""
    try:
        return int(json.loads((folder / METADATA).read_text())["commit_timestamp_nsecs"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def content_digest(folder: epath.Path) -> str | None:
    """16 hexadecimal digits that stand for every array of a complete checkpoint; None if it has no checksums."""
    parts = sorted((folder / STATE / PARTS).glob("*.json"))
    return hashlib.blake2b(b"".join(part.read_bytes() for part in parts), digest_size=8).hexdigest() if parts else None


class Damage(NamedTuple):
    """What is wrong with a file, and the array whose data are in that place, if any are."""

    file: str
    why: str
    array: str | None = None

    def __str__(self) -> str:
        return f"{self.array} in {self.file}: {self.why}" if self.array else f"{self.file}: {self.why}"


def damage(folder: epath.Path, state: str) -> list[Damage]:
    """All that differs from what was saved in the checkpoint `folder`, whose arrays are in its folder `state`.

    Each process reads a share of the files, and all return the same: every process has to call. Raises `OSError` if the
    folder cannot be read at all.
    """
    found: list[Damage] = []
    files = _expected(folder, folder / state, found)
    return _differing(folder, [span for path, segments in files.items() for span in _spans(path, segments)], found)


def damage_here(folder: epath.Path, state: str) -> list[Damage]:
    """As `damage`, where this process alone reads all: the others need not call."""
    found: list[Damage] = []
    files = _expected(folder, folder / state, found)
    return list(dict.fromkeys(found + _wrong_of(folder, [s for p, one in files.items() for s in _spans(p, one)])))


def damage_besides_arrays(folder: epath.Path, state: str) -> list[Damage]:
    """As `damage`, but of the data of arrays only whether their files are there and as long as they were: quick."""
    found = wrong_lengths(folder, state)
    files = _expected(folder, folder / state, [])
    spans = [span for path, segments in files.items() for span in _spans(path, segments)]
    return _differing(folder, [span for span in spans if span[1].array in (None, INDEX)], found)


def _differing(folder: epath.Path, spans: Sequence[tuple[Span, Segment, bool]], found: list[Damage]) -> list[Damage]:
    """`found`, and what differs in any of the spans, without duplicates."""
    return _of_all_processes(found + _wrong_of(folder, spans[jax.process_index() :: jax.process_count()]))


def _wrong_of(folder: epath.Path, spans: Sequence[tuple[Span, Segment, bool]]) -> list[Damage]:
    with ThreadPoolExecutor(THREADS) as threads:
        wrong = threads.map(lambda one: _wrong(folder, *one), spans)
        return [one for one in wrong if one is not None]


def wrong_lengths(folder: epath.Path, state: str) -> list[Damage]:
    """As `damage`, but only files that are missing or of another length: none of their bytes is read."""
    found: list[Damage] = []
    for path, segments in _expected(folder, folder / state, found).items():
        file, size = str(path.relative_to(folder)), sum(segment.size for segment in segments)
        if not path.exists():
            found.append(Damage(file, "it is missing"))
        elif path.stat().length != size:
            found.append(Damage(file, f"it has {path.stat().length:,} bytes, and {size:,} were saved"))
    return found


def _expected(folder: epath.Path, state: epath.Path, found: list[Damage]) -> dict[epath.Path, list[Segment]]:
    """The segments of the files of a checkpoint; what is wrong with the checksums themselves is added to `found`."""
    content = metadata(folder)
    if not content:
        found.append(Damage(METADATA, "it is missing or cannot be read"))
    if not content and not (state / PARTS).exists():
        return {}
    first = _part(folder, part_file(state, 0), found)
    if content and "content" in first and content_crc32(content) != first["content"]:
        found.append(Damage(METADATA, "what was saved in it besides the arrays has changed"))
    parts = [first, *(_part(folder, part_file(state, n), found) for n in range(1, first.get("processes", 1)))]
    files = {state / name: segments for part in parts for name, segments in part.get("files", {}).items()}
    if (folder / CHECKSUMS).exists():  # it is not there if the run was killed in the moment after the save
        last = _part(folder, folder / CHECKSUMS, found)
        files |= {folder / name: segments for name, segments in last.get("files", {}).items()}
    return {path: [Segment(*one) for one in segments] for path, segments in files.items()}


def _part(folder: epath.Path, path: epath.Path, found: list[Damage]) -> dict[str, Any]:
    try:
        return unsigned(path.read_text())
    except FileNotFoundError:
        why = "it is missing"
    except (OSError, ValueError):
        why = "its own checksum differs"
    found.append(Damage(str(path.relative_to(folder)), why))
    return {}


def _spans(path: epath.Path, segments: Iterable[Segment]) -> Iterator[tuple[Span, Segment, bool]]:
    """Each segment, where it is, and whether it is the last of its file."""
    start, left = 0, list(segments)
    for number, segment in enumerate(left, 1):
        yield Span(path, start, segment.size), segment, number == len(left)
        start += segment.size


def _wrong(folder: epath.Path, span: Span, segment: Segment, last: bool) -> Damage | None:
    file, end = str(span.file.relative_to(folder)), span.start + span.size
    try:
        if crc32_of(span) != segment.crc32:
            return Damage(file, f"bytes {span.start:,} to {end:,} are not those that were saved", segment.array)
        if last and span.file.stat().length > end:
            return Damage(file, f"it is longer than the {end:,} bytes that were saved")
    except FileNotFoundError:
        return Damage(file, "it is missing", segment.array)
    except EOFError:
        return Damage(file, f"it is shorter than the {end:,} bytes that were saved", segment.array)
    except OSError as error:
        return Damage(file, error.strerror or str(error), segment.array)
    return None


def _of_all_processes(found: list[Damage]) -> list[Damage]:
    if jax.process_count() == 1:
        return list(dict.fromkeys(found))
    from jax.experimental.multihost_utils import process_allgather

    text = np.frombuffer(json.dumps(found).encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.int32(text.size)))
    texts = process_allgather(np.pad(text, (0, int(sizes.max()) - text.size)))
    every = [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True)]
    return list(dict.fromkeys(Damage(*one) for lines in every for one in lines))
