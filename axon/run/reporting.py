"""What `axon report` says of a run: a summary in lines or JSON, and its page."""

import json
from pathlib import Path
from typing import Any

from axon.disk import reading, writing
from axon.observe.goodput import PARTS, Goodput, goodput
from axon.observe.lines import read_lines
from axon.observe.page import Run, page, seconds_text
from axon.run.folder import RunFolder


class RunReport:
    """The report of a run in a folder, finished or not. Raises `UserError` if it is not the folder of a run."""

    def __init__(self, path: Path):
        self.folder = RunFolder.existing(path)
        self._events, self._metrics = read_lines(self.folder.events), read_lines(self.folder.metrics)
        self.time: Goodput = goodput(self._events, self._metrics)

    def summary(self) -> dict[str, Any]:
        """The goodput, a fraction of 1, and the seconds of each part of the time."""
        time = self.time
        return {"goodput": time.share, "total_seconds": time.total, "starts": time.starts, "seconds": time.seconds}

    def lines(self) -> list[str]:
        """The summary for a person, one part of the time a line."""
        time, wide = self.time, max(map(len, PARTS))
        if not time.starts:
            return [f"{self.folder.events} has no start, so where the time went is not known"]
        parts = [
            f"  {name:<{wide}} {seconds_text(value):>9} {100 * value / time.total if time.total else 0:5.1f} %  "
            f"{PARTS[name]}"
            for name, value in time.seconds.items()
            if value > 0
        ]
        starts = f"{time.starts} start{'s' * (time.starts != 1)}"
        return [f"goodput {100 * time.share:.1f} % of {seconds_text(time.total)}, in {starts}", *parts]

    def write_page(self, path: Path) -> None:
        """Write the page. Raises `UserError` if that cannot be."""
        with reading(self.folder.path):
            record = json.loads(self.folder.record.read_text("utf-8")) if self.folder.record.is_file() else {}
            config = self.folder.config.read_text("utf-8")
        name = self.folder.path.absolute().name
        with writing(path):
            path.write_text(page(Run(name, self._events, self._metrics, config, record), self.time), "utf-8")
