"""The run's diary: `metrics.jsonl`, one JSON object per line, written as it happens."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from axon.disk import reading, writing
from axon.errors import UserError

Row = dict[str, Any]


def read_metrics(path: str | Path) -> list[Row]:
    """All rows of a metrics file, in order; none if there is no such file.

    A torn last line, as a killed run leaves it, is left out. Raises `UserError` at any other line that is not JSON.
    """
    path = Path(path)
    with reading(path):
        content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")[:-1]  # what follows the last newline was never finished
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not a line of JSON ({error}); delete that line to go on") from error
    if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
        raise UserError(f"{path}:{number}: expected a JSON object with the metrics of a step, not {row!r}")
    return row


def missing_steps(rows: Sequence[Row], last: int) -> list[int]:
    """The steps from 1 to `last` of which no row has a loss, as where the file was shortened or is gone."""
    return sorted(set(range(1, last + 1)) - {row["step"] for row in rows if "loss" in row and "step" in row})


class MetricsFile:
    """Appends rows to a metrics file; every row is on disk's side of the process when `append` returns.

    A torn last line from an earlier, killed run is dropped on opening, so that it cannot merge with the next row.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
            self._drop_torn_line()

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row. Numbers may be scalars of NumPy or JAX; NaN and infinities become null: JSON has none."""
        line = json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False)
        left = line.encode() + b"\n"
        with writing(self.path):
            while left:  # one unbuffered write, so a kill tears one line at most; a full disk may take half of it
                left = left[self._file.write(left) :]

    def cut_back(self, step: int) -> int:
        """Drops the rows of steps after `step`, whole or nothing; returns how many. Rows without a step stay."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row.get("step", step) <= step]
        if len(kept) < len(rows):
            self._replace(kept)
        return len(rows) - len(kept)

    def close(self) -> None:
        """No row can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _replace(self, rows: list[Row]) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        with writing(self.path):
            fresh.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self._file.close()
            os.replace(fresh, self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def _drop_torn_line(self) -> None:
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
