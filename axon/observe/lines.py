"""Files of one JSON object per line, appended as a run goes on: `metrics.jsonl` and `events.jsonl`."""

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from axon.disk import reading, writing
from axon.errors import UserError
from axon.foreign_json import NULL, Kind, Required, integer, parse_json, read_field

Record = dict[str, Any]
FIELDS = {"step": integer("[0, 2**63)") | NULL}
"""Fields of a record, where a file has no others."""


def read_lines(path: str | Path, fields: Mapping[str, Kind] = FIELDS, required: Collection[str] = ()) -> list[Record]:
    """All records of a file, in order; none if there is no such file.

    An incomplete last line, of a killed run, is left out; NaN and infinities are None. Raises `UserError` at any other
    line that is not JSON, has a field of another kind than `fields` says, or lacks a `required` one.
    """
    path = Path(path)
    with reading(path):
        content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")[:-1]  # what follows the last newline is incomplete
    places = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    return [_parsed(where, line, fields, required) for where, line in places]


def _parsed(where: str, line: bytes, fields: Mapping[str, Kind], required: Collection[str]) -> Record:
    try:
        record = {name: _plain(value) for name, value in parse_json(line, where).items()}
        for name, kind in fields.items():
            read_field(where, record, name, kind, Required if name in required else None)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}. Delete that line to continue") from error
    return record


class LinesFile:
    """Appends records to a file, unbuffered: a record survives the process once `append` returns.

    An incomplete last line of a killed run is dropped on opening, or the next record would be appended to it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
            self._drop_incomplete_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record. Numbers may be scalars of NumPy or JAX; NaN and infinities become null: JSON has none.

        Raises `UserError` if it cannot be written; what was written of it is taken back.
        """
        self.write(line(record))

    def write(self, text: bytes) -> None:
        """Writes lines, as `append` does one."""
        written = 0
        with writing(self.path):
            try:
                while written < len(text):  # one unbuffered write, so a kill truncates one line at most
                    written += self._file.write(text[written:])
            except OSError:
                if written:  # a full disk took part of it
                    os.truncate(self.path, os.path.getsize(self.path) - written)
                raise

    def close(self) -> None:
        """No record can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _drop_incomplete_line(self) -> None:
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)


def line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON."""
    text = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
