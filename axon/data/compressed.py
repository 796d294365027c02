"""Files that may be compressed, read as what they hold: their first bytes tell, whatever they are called."""

import importlib
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon.disk import reading
from axon.errors import UserError


@dataclass(frozen=True)
class Compression:
    """suffix: of its files. module: of the standard library, that reads it. begins: its files' first bytes."""

    suffix: str
    module: str
    begins: bytes


COMPRESSIONS = (
    Compression(".gz", "gzip", rb"\x1f\x8b\x08"),
    Compression(".bz2", "bz2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    Compression(".xz", "lzma", rb"\xfd7zXZ\0"),
    Compression(".zst", "compression.zstd", rb"\x28\xb5\x2f\xfd"),
)
NOT_TEXT = {
    "a Parquet file (use the source Parquet)": rb"PAR1",
    "a zip archive (unpack it)": rb"PK\x03\x04",
    "a tar archive (unpack it)": rb"(?s).{257}ustar",
    "a PDF (extract its text)": rb"%PDF-",
}
FIRST = 512
"""Bytes that are enough to tell."""


def uncompressed(path: Path) -> Path:
    """The path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix.lower() in [one.suffix for one in COMPRESSIONS] else path


@contextmanager
def content(path: Path) -> Iterator[Any]:
    """The bytes of a file of text, decompressed, as an open file. Raises `UserError` for one that cannot be read."""
    with reading(path), path.open("rb") as file:
        compression = next((one for one in COMPRESSIONS if re.match(one.begins, file.peek(FIRST))), None)
        if compression is None:
            _check_text(path, file)
            yield file
            return
        module = _module(path, compression)
        damaged = [vars(module)[name] for name in ("LZMAError", "ZstdError") if name in vars(module)]
        try:
            with module.open(file) as inner:
                _check_text(path, inner)
                yield inner
        except (EOFError, zlib.error, *damaged) as error:
            raise UserError(f"{path} cannot be read: its {compression.suffix} data are damaged: {error}") from error


def _module(path: Path, compression: Compression) -> Any:
    try:
        return importlib.import_module(compression.module)
    except ModuleNotFoundError:
        raise UserError(
            f"{path} is compressed as {compression.suffix} files are, which this Python's standard library cannot "
            "read: decompress it, or compress it with gzip, bzip2 or xz"
        ) from None


def _check_text(path: Path, file: Any) -> None:
    begin = file.peek(FIRST)
    if kind := next((kind for kind, begins in NOT_TEXT.items() if re.match(begins, begin)), None):
        raise UserError(f"{path} is {kind}, not text")
