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
from axon.data.records import files_below, files_key, fingerprint, text_in, text_of
from axon.disk import check_paths, named, reading
from axon.errors import UserError
from axon.fields import FilePath


@runtime_checkable
class Source(Protocol):
    """Documents of text. A source of your own is any dataclass with these three."""

    @property
    def name(self) -> str:
        """Its name in reports and folder names."""
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
class Folder:
    """Every file below `path` that matches the glob `pattern`, one document each; `path` may also be one file."""

    path: FilePath
    pattern: str = "**/*.txt"

    def __post_init__(self):
        check_paths(self)

    @property
    def name(self) -> str:
        return Path(self.path).absolute().name

    def key(self) -> str:
        return fingerprint("folder", files_key(self.path, self.pattern))

    def texts(self) -> Iterator[str]:
        return map(text_in, files_below(self.path, self.pattern))


@dataclass(frozen=True)
class JsonLines:
    """One JSON object a line, the document in `field`; `path` is a file, or a folder whose `.jsonl` files are read."""

    path: FilePath
    field: str = "text"

    def __post_init__(self):
        check_paths(self)

    @property
    def name(self) -> str:
        return Path(self.path).absolute().stem

    def key(self) -> str:
        return fingerprint("jsonl", self.field, files_key(self.path, "**/*.jsonl"))

    def texts(self) -> Iterator[str]:
        for path in files_below(self.path, "**/*.jsonl"):
            with reading(path), path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield text_of(_json_object(line, f"{path}:{number}"), self.field, f"{path}:{number}")


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
        words = np.array([_word(number) for number in range(self.vocab)])
        for document in range(self.documents):
            random = np.random.default_rng((self.seed, document))
            yield " ".join(words[random.integers(self.vocab, size=self.length)])


def _word(number: int) -> str:
    """`number` in base 26, written in letters."""
    rest, letter = divmod(number, 26)
    return (_word(rest - 1) if rest else "") + string.ascii_lowercase[letter]


def parse_source(text: str) -> Source:
    """The source named by one word: `stdlib`, `hf:NAME`, or the path of a folder, `.jsonl` or `.parquet`.

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
    return {".jsonl": JsonLines, ".parquet": Parquet}.get(path.suffix, Folder)(text)
