"""The folder of a run: what is in it, and whether it may be continued."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axon.checkpoint import Reader
from axon.config import differences, dump, load
from axon.errors import UserError

FREE = ("layout", "steps", "checkpoints", "trackers", "evaluation", "sample", "run_dir", "data.store", "data.threads")
"""What may differ when a run is continued: nothing of it changes the losses."""


class RunFolder:
    """`config.gin`, `metrics.jsonl`, `checkpoints/`, `tokenizer.json`, `loss.png` and `run.json` of one run."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.config = self.path / "config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = self.path / "tokenizer.json"
        self.plot = self.path / "loss.png"
        self.record = self.path / "run.json"

    @classmethod
    def existing(cls, path: Path | str) -> "RunFolder":
        """The folder of a run that was begun; `UserError` if `path` is none."""
        folder = cls(path)
        if not folder.config.is_file():
            raise UserError(f"{path} is not the folder of a run: it has no config.gin. `axon train` makes one")
        return folder

    def tree(self) -> Any:
        """The `Train` that was run here."""
        return load(self.config).tree

    def check_continues(self, train: Any) -> None:
        """Raise `UserError` if `train` is not the run that is recorded here, with every difference."""
        if self._trained():
            self._refuse(differences(self.tree(), train, FREE))

    def check_same_text(self, data_identity: Mapping[str, Any]) -> None:
        """Raise `UserError` if the run that is recorded here was trained on other text."""
        recorded = json.loads(self.record.read_text()) if self._trained() and self.record.is_file() else {}
        before, now = recorded.get("data", {}).get("digests"), data_identity["digests"]
        if before not in (None, now):
            self._refuse([f"data: the text itself has changed (digests {before} → {now})"])

    def write(self, train: Any, record: Mapping[str, Any]) -> None:
        """Record what is run, before anything else is written. Raises `UserError` if the folder cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.config, dump(train))
            _replace(self.record, json.dumps(record, indent=2, default=str) + "\n")
        except OSError as error:
            raise UserError(f"cannot write the run's folder {self.path}: {error}. Give another --run-dir") from error

    def _trained(self) -> bool:
        """Whether there is anything to continue: a run that did not come to its first step may be begun anew."""
        rows = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return self.config.is_file() and (rows or Reader(self.checkpoints).latest() is not None)

    def _refuse(self, found: Sequence[str]) -> None:
        if found:
            raise UserError(
                f"{self.path} holds another run; it differs in\n"
                + "\n".join(f"  {line}" for line in found)
                + "\nGive another --run-dir, or take the changes back. Layout, steps, evaluation, saving and trackers "
                "are free to change"
            )


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)
