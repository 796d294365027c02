"""Parts that sources share: finding files, fingerprinting their content, reading the text of a record."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from axon.data.compressed import content, uncompressed
from axon.disk import check_paths, named, reading
from axon.errors import UserError, suggest
from axon.fields import FilePath

SHOWN = 5
"""Files, or suffixes of files, that are named at most."""


Record = Mapping[str, Any]
"""One row of a table, or object of a line: column → value."""


@runtime_checkable
class RecordSource(Protocol):
    """Records, such as chats. A source of your own is any dataclass with these three."""

    @property
    def name(self) -> str:
        """The name in reports."""
        ...

    def key(self) -> str:
        """Changes when the records change, as far as that shows without reading them."""
        ...

    def records(self) -> Iterator[tuple[str, Record]]:
        """Where each record is, for messages, and the record; in the same order every time."""
        ...


def fingerprint(*parts: Any) -> str:
    """16 hexadecimal digits that stand for `parts`, which must be JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Files:
    """A source's files: `path` itself if it is a file, else those below it that match one of its `patterns`."""

    path: FilePath

    def __post_init__(self):
        check_paths(self)

    @property
    def name(self) -> str:
        return Path(self.path).absolute().stem

    @property
    def patterns(self) -> tuple[str, ...]:
        """Globs, whose suffix is matched in any case, and with that of a compression after it."""
        raise NotImplementedError

    def files(self) -> list[Path]:
        return files_below(self.path, *self.patterns)

    def listed(self) -> Self:
        """The same files, listed but once, when they are first asked for: for one preparation."""
        same = copy(self)
        object.__setattr__(same, "files", cache(self.files))
        return same

    def notices(self) -> list[str]:
        """What a person should know of what is read: the files of a folder that are not."""
        if (root := named(self.path, "the source's path")).is_file():
            return []
        read = set(self.files())
        below = any("**" in pattern for pattern in self.patterns)
        others = [one for one in _listed(root, below) if one not in read and not _hidden(one.relative_to(root))]
        return [f"{root} is read but for {listed(others)}"] if others else []


def files_below(path: str | Path, *patterns: str) -> list[Path]:
    """The files a source reads, sorted: `path` itself if it is a file, else what matches one of the globs below it.

    A pattern's suffix is matched in any case, and compressed: `*.txt` finds `a.TXT` and `b.txt.gz`. A compressed file
    beside its own content, as `gzip --keep` leaves it, is left out.

    Raises:
        UserError: nothing is at `path`, a folder below it cannot be read, or nothing below it matches.
    """
    root = named(path, "the source's path")
    with reading(root):
        root.stat()
        if root.is_file():
            return [root]
        everything = _listed(root, any("**" in pattern for pattern in patterns))
    found = {one for pattern in patterns for one in _matches(root, pattern)}
    if any(uncompressed(one) != one for one in everything):
        others = (one for pattern in patterns for one in _matches(root, pattern, ".*"))
        found |= {one for one in others if uncompressed(one) != one}
    found = {one for one in found if uncompressed(one) == one or uncompressed(one) not in found}
    if not found:
        there = f" There are {listed(everything)}" if everything else ""
        raise UserError(
            f"No file below {root} matches {' or '.join(map(repr, patterns))}: give another folder or pattern.{there}"
        )
    return sorted(found)


def _listed(root: Path, below: bool) -> list[Path]:
    """All files in a folder, or `below` it. Raises `OSError` for a folder that cannot be listed, which a glob would
    skip silently."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, _, names in os.walk(root, onerror=refuse):
        found += [Path(folder, name) for name in names]
        if not below:
            break
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _matches(root: Path, pattern: str, after: str = "") -> set[Path]:
    """The files below `root` that match a glob, its suffix in any case, with that of `after`."""
    head, dot, suffix = pattern.rpartition(".")
    any_case = "".join(f"[{sign.lower()}{sign.upper()}]" for sign in suffix)
    glob = head + dot + any_case if suffix.isalnum() else pattern
    try:
        return {found for found in root.glob(glob + after) if found.is_file()}
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"pattern {pattern!r}: {error}; expected one relative to {root}, as '**/*.txt'") from None


def listed(paths: Sequence[Path]) -> str:
    """A few files by name, many by how many there are of each suffix."""
    if len(paths) <= SHOWN:
        return ", ".join(sorted(path.name for path in paths))
    counts = Counter(path.suffix or path.name for path in paths)
    most = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(SHOWN))
    return f"{len(paths):,} files ({most}{', …' if len(counts) > SHOWN else ''})"


def files_key(files: Sequence[Path]) -> str:
    """Changes when a file is added, removed, moved or written: path, size, time."""
    stats = []
    for file in files:
        with reading(file):
            stats.append((str(file), file.stat()))
    return fingerprint([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def text_in(path: Path) -> str:
    """All of a file, decompressed. Bytes that are not UTF-8 become lone surrogates (PEP 383), which preparation
    counts."""
    with content(path) as file:
        return file.read().decode("utf-8", "surrogateescape")


def text_of(record: Mapping[str, Any], field: str, where: str) -> str:
    """The text in `field` of one record; a null is an empty document, which is left out later.

    Raises:
        UserError: `where` has no such field, or it does not hold text.
    """
    if field not in record:
        raise UserError(f"{where}: there is no field {field!r}.{suggest(field, record)} Set the source's `field`.")
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} holds {type(text).__name__} ({text!r:.40}), expected text.")
    return text
