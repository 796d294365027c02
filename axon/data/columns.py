"""The sources that need `scripts/setup data`: Parquet files, and datasets of the Hugging Face hub."""

import importlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axon.checks import check_range
from axon.data.records import Files, Record, files_below, files_key, fingerprint, text_of
from axon.errors import UserError, suggest


@dataclass(frozen=True)
class Parquet(Files):
    """One document a row, in column `field`; `path` is a file, or a folder whose `.parquet` files are read."""

    field: str = "text"

    @property
    def patterns(self) -> tuple[str, ...]:
        return ("**/*.parquet",)

    def key(self) -> str:
        return fingerprint("parquet", self.field, files_key(self.files()))

    def texts(self) -> Iterator[str]:
        for path in self.files():
            for row, record in enumerate(self._rows(path, [self.field])):
                yield text_of(record, self.field, f"{path} row {row}")

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `RecordSource`: all columns, whatever `field` is, `without_nulls`."""
        for path in self.files():
            for row, record in enumerate(self._rows(path, None)):
                yield f"{path} row {row}", without_nulls(record)

    def _rows(self, path: Path, columns: list[str] | None) -> Iterator[Record]:
        """Each row's values by column; of all columns for None."""
        pyarrow, parquet = _needed("pyarrow", "Parquet"), _needed("pyarrow.parquet", "Parquet")
        try:
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                if columns is not None and self.field not in names:
                    raise UserError(f"{path}: there is no column {self.field!r}.{suggest(self.field, names)}")
                for batch in file.iter_batches(batch_size=1024, columns=columns):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {error}") from None


@dataclass(frozen=True)
class HuggingFace:
    """A dataset by its name on the hub (or a local folder of one), streamed; `documents`: read only so many, the first.

    Prepared tokens are cached by these fields alone: a change of the dataset on the hub is not detected.
    """

    name: str
    split: str = "train"
    field: str = "text"
    config: str | None = None
    documents: int | None = None

    def __post_init__(self):
        check_range(self, "[1, inf)", "documents")
        if not self.name:
            raise UserError("HuggingFace.name is ''; expected the name of a dataset, as in hf:OWNER/NAME")

    def key(self) -> str:
        local = files_key(files_below(self.name, "**/*")) if os.path.exists(self.name) else None
        return fingerprint("hf", asdict(self), local)

    def texts(self) -> Iterator[str]:
        return (text_of(record, self.field, where) for where, record in self.records())

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `RecordSource`: all columns, whatever `field` is, `without_nulls`."""
        for number, record in enumerate(self._stream()):
            yield f"{self.name} ({self.split}) record {number}", without_nulls(record)

    def _stream(self) -> Iterator[Any]:
        datasets = _needed("datasets", "HuggingFace")
        try:
            stream = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
            yield from itertools.islice(stream, self.documents)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            wanted = f"dataset {self.name!r} (config {self.config!r}, split {self.split!r})"
            raise UserError(f"Hugging Face {wanted} cannot be read: {error}") from None


def without_nulls(record: Record) -> Record:
    """A row of Arrow's, of which nested objects have those keys alone that have a value: Arrow gives all objects of a
    column the keys that any of them has."""
    return {column: _without_nulls(value) for column, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return value


def _needed(module: str, source: str) -> Any:
    """An optional module, imported when a source that needs it is first read."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{source} needs the package {error.name!r}: run scripts/setup data") from None
