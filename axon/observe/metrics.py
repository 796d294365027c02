"""A run's `metrics.jsonl`: one JSON object per line, appended at each step."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from axon.disk import reading, writing
from axon.errors import UserError

Record = dict[str, Any]


def read_metrics(path: str | Path) -> list[Record]:
    """All records of a metrics file, in order; none if there is no such file.

    An incomplete last line, of a killed run, is left out. Raises `UserError` at any other line that is not JSON.
    """
    path = Path(path)
    with reading(path):
        content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")[:-1]  # what follows the last newline is incomplete
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def held_out_losses(path: str | Path) -> dict[int, float]:
    """By step, the loss on held-out text in a metrics file. Raises as `read_metrics` does."""
    return {record["step"]: record["eval_loss"] for record in read_metrics(path) if "eval_loss" in record}


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: invalid JSON ({error}); delete that line to continue") from error
    if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
        raise UserError(f"{path}:{number}: expected a JSON object with the metrics of a step, not {record!r}")
    return record


def missing_steps(records: Sequence[Record], last: int) -> list[int]:
    """The steps from 1 to `last` without a record of their loss, as where the file was shortened or deleted."""
    return sorted(
        set(range(1, last + 1)) - {record["step"] for record in records if "loss" in record and "step" in record}
    )


class MetricsFile:
    """Appends records to a metrics file, unbuffered: a record survives the process once `append` returns.

    An incomplete last line of a killed run is dropped on opening, or the next record would be appended to it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the run
            self._drop_incomplete_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record. Numbers may be scalars of NumPy or JAX; NaN and infinities become null: JSON has none."""
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
        left = line.encode() + b"\n"
        with writing(self.path):
            while left:  # one unbuffered write, so a kill truncates one line at most; a full disk may take part of it
                left = left[self._file.write(left) :]

    def cut_back(self, step: int) -> int:
        """Drops the records of steps after `step`, atomically; returns how many. Records without a step stay."""
        records = read_metrics(self.path)
        remaining = [record for record in records if record.get("step", step) <= step]
        if len(remaining) < len(records):
            self._replace(remaining)
        return len(records) - len(remaining)

    def close(self) -> None:
        """No record can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _replace(self, records: list[Record]) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        with writing(self.path):
            fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
            self._file.close()
            os.replace(fresh, self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def _drop_incomplete_line(self) -> None:
        content = self.path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
