"""What sources share: finding files, fingerprinting their content, reading the text of a record."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon.disk import named, reading
from axon.errors import UserError, suggest


def fingerprint(*parts: Any) -> str:
    """16 hexadecimal digits that stand for `parts`, which must be JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def files_below(path: str | Path, pattern: str) -> list[Path]:
    """The files a source reads, sorted: `path` itself if it is a file, else what matches the glob `pattern` below it.

    Raises:
        UserError: nothing is at `path`, a folder below it cannot be read, or nothing below it matches.
    """
    root = named(path, "the source's path")
    with reading(root):
        root.stat()
        if root.is_file():
            return [root]
        _check_folders(root, "**" in pattern)
    try:
        files = sorted(found for found in root.glob(pattern) if found.is_file())
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"pattern {pattern!r}: {error}; expected one relative to {root}, as '**/*.txt'") from None
    if not files:
        raise UserError(f"No file below {root} matches {pattern!r}: give another folder or pattern.")
    return files


def _check_folders(root: Path, below: bool) -> None:
    """Raises `OSError` for a folder that cannot be listed, which a glob would skip silently."""

    def refuse(error: OSError) -> None:
        raise error

    for _ in os.walk(root, onerror=refuse):
        if not below:
            return


def files_key(path: str | Path, pattern: str) -> str:
    """Changes when a file that `files_below` finds is added, removed, moved or written: path, size, time."""
    with reading(path):
        stats = [(str(file), file.stat()) for file in files_below(path, pattern)]
    return fingerprint([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def text_in(path: Path) -> str:
    """All of a file. Bytes that are not UTF-8 become lone surrogates (PEP 383), which preparation counts."""
    with reading(path):
        return path.read_bytes().decode("utf-8", "surrogateescape")


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
