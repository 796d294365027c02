"""A run's `metrics.jsonl`: one JSON object per line, appended at each step."""

import os
from collections.abc import Sequence
from pathlib import Path

from axon.disk import writing
from axon.foreign_json import NULL, NUMBER
from axon.observe import lines
from axon.observe.lines import LinesFile, Record, line, read_lines

NUMBERS = (
    *("loss", "tokens", "tokens_per_second", "step_seconds", "grad_norm", "mfu", "skipped"),
    *("eval_loss", "eval_bits_per_byte", "expert_load", "expert_dropped", "router_entropy"),
)
FIELDS = lines.FIELDS | dict.fromkeys(NUMBERS, NUMBER | NULL)
"""Those that Axon itself reads."""


def read_metrics(path: str | Path) -> list[Record]:
    """All records of a metrics file, in order, as `read_lines` reads them."""
    return read_lines(path, FIELDS)


def held_out_losses(path: str | Path) -> dict[int, float]:
    """By step, the loss on held-out data in a metrics file, where it is a number. Raises as `read_metrics` does."""
    evaluated = (record for record in read_metrics(path) if record.get("eval_loss") is not None and "step" in record)
    return {record["step"]: record["eval_loss"] for record in evaluated}


def missing_steps(records: Sequence[Record], last: int, begun: int = 0) -> list[int]:
    """The steps after `begun` to `last` without a record of their loss, as where the file was shortened or deleted."""
    logged = {record["step"] for record in records if "loss" in record and "step" in record}
    return sorted(set(range(begun + 1, last + 1)) - logged)


class MetricsFile(LinesFile):
    """Appends records of steps; those after the step that a run goes on from can be dropped."""

    def cut_back(self, step: int) -> list[Record]:
        """Drops the records of steps after `step`, atomically, and returns them. Records without a step stay."""
        records = read_metrics(self.path)
        dropped = [record for record in records if record.get("step", step) > step]
        if dropped:
            self._replace([record for record in records if record.get("step", step) <= step])
        return dropped

    def _replace(self, records: list[Record]) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        with writing(self.path):
            fresh.write_bytes(b"".join(map(line, records)))
            self._file.close()
            os.replace(fresh, self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
