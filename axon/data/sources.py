"""Where text comes from: each source has a name, a fingerprint of its content, and documents in a fixed order."""

import json
import os
import string
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from axon.checks import check_range
from axon.data.columns import HuggingFace, Parquet
from axon.data.compressed import content, uncompressed
from axon.data.records import Files, Record, files_below, files_key, fingerprint, text_in, text_of
from axon.disk import named
from axon.errors import UserError


@runtime_checkable
class Source(Protocol):
    """Documents of text. A source of your own is any dataclass with these three."""

    @property
    def name(self) -> str:
        """The name in reports and folder names."""
        ...

    def key(self) -> str:
        """Changes when the documents change, as far as that shows without reading them."""
        ...

    def texts(self) -> Iterator[str]:
        """Every document, in the same order every time, a few in memory at once.

        A lone surrogate stands for a byte that is not UTF-8 (PEP 383).
        """
        ...


@dataclass(frozen=True)
class Stdlib:
    """The `.py` files of the running Python's standard library, its tests included: about 30 MB of real text."""

    @property
    def name(self) -> str:
        return "stdlib"

    def key(self) -> str:
        # Sizes, not times: the same Python installed twice is the same text.
        root = _stdlib()
        sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in self._files()]
        return fingerprint("stdlib", sys.version, sizes)

    def texts(self) -> Iterator[str]:
        return map(text_in, self._files())

    def _files(self) -> list[Path]:
        foreign = {"site-packages", "dist-packages", "__pycache__"}
        root = _stdlib()
        return [path for path in files_below(root, "**/*.py") if not foreign & set(path.relative_to(root).parts)]


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Folder(Files):
    """Every file below `path` that matches the glob `pattern`, one document each; `path` may also be one file.

    The pattern's suffix is matched in any case, and files compressed by gzip, bzip2 or xz are read as what they hold.
    """

    pattern: str = "**/*.txt"

    @property
    def name(self) -> str:
        return Path(self.path).absolute().name

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern,)

    def key(self) -> str:
        return fingerprint("folder", files_key(self.files()))

    def texts(self) -> Iterator[str]:
        return map(text_in, self.files())


@dataclass(frozen=True)
class JsonLines(Files):
    """One JSON object a line, the document in `field`; `path` is a file, or a folder whose `.jsonl` and `.ndjson` files
    are read. They may be compressed by gzip, bzip2 or xz, as `.jsonl.gz`."""

    field: str = "text"

    @property
    def patterns(self) -> tuple[str, ...]:
        return "**/*.jsonl", "**/*.ndjson"

    def key(self) -> str:
        return fingerprint("jsonl", self.field, files_key(self.files()))

    def texts(self) -> Iterator[str]:
        return (text_of(record, self.field, where) for where, record in self.records())

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `RecordSource`: all of each object, whatever `field` is."""
        for path in self.files():
            with content(path) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path}:{number}", _json_object(line, f"{path}:{number}")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); expected one JSON object on each line.") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object on each line, found {type(record).__name__}.")
    return record


@dataclass(frozen=True)
class Synthetic:
    """`documents` documents of `length` words, drawn uniformly from `vocab` random words by `seed`: for benchmarks."""

    vocab: int = 1000
    documents: int = 1000
    length: int = 256
    seed: int = 0

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "vocab", "documents", "length")
        check_range(self, "[0, inf)", "seed")

    @property
    def name(self) -> str:
        return "synthetic"

    def key(self) -> str:
        return fingerprint("synthetic", asdict(self))

    def texts(self) -> Iterator[str]:
        words = [_word(number) for number in range(self.vocab)]  # joining a NumPy array of them swallows Ctrl-C
        for document in range(self.documents):
            random = np.random.default_rng((self.seed, document))
            yield " ".join([words[number] for number in random.integers(self.vocab, size=self.length).tolist()])


def _word(number: int) -> str:
    """`number` in base 26, written in letters."""
    rest, letter = divmod(number, 26)
    return (_word(rest - 1) if rest else "") + string.ascii_lowercase[letter]


BY_SUFFIX = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines, ".parquet": Parquet}
"""What `parse_source` makes of a file, or of a folder of that name."""


def parse_source(text: str) -> Source:
    """The source named by one word: `stdlib`, `hf:NAME`, or the path of a folder or file.

    A file's suffix, in any case and before that of a compression, says what is in it: see `BY_SUFFIX`; else it is text.

    Raises:
        UserError: it is none of these.
    """
    if text == "stdlib":
        return Stdlib()
    if text.startswith("hf:"):
        return HuggingFace(text.removeprefix("hf:"))
    path = named(text, "source")
    if not os.path.exists(path):
        raise UserError(f"There is no source {text!r}: expected 'stdlib', 'hf:NAME', or the path of a folder or file.")
    return BY_SUFFIX.get(uncompressed(path).suffix.lower(), Folder)(text)
