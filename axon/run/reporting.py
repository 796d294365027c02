"""The report of `axon report` on a run: a summary in lines or JSON, and its page."""

from pathlib import Path
from typing import Any

from axon.disk import reading, writing
from axon.foreign_json import read_json
from axon.observe.events import read_events
from axon.observe.goodput import PARTS, Goodput, goodput
from axon.observe.metrics import read_metrics
from axon.observe.page import Run, page, seconds_text
from axon.run.branch import parent_text
from axon.run.folder import RunFolder
from axon.run.profiling import profile_tables


class RunReport:
    """The report of a run in a folder, finished or not. Raises `UserError` if it is not the folder of a run."""

    def __init__(self, path: Path):
        self.folder = RunFolder.existing(path)
        self._events, self._metrics = read_events(self.folder.events), read_metrics(self.folder.metrics)
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
        begun = [parent_text(event) for event in self._events if event.get("kind") == "branch"][-1:]
        starts = f"{time.starts} start{'s' * (time.starts != 1)}"
        return [f"goodput {100 * time.share:.1f} % of {seconds_text(time.total)}, in {starts}", *parts, *begun]

    def write_page(self, path: Path) -> None:
        """Write the page. Raises `UserError` if that cannot be."""
        record = read_json(self.folder.record) if self.folder.record.is_file() else {}
        with reading(self.folder.config):
            config = self.folder.config.read_text("utf-8")
        name = self.folder.path.absolute().name
        with writing(path):
            run = Run(name, self._events, self._metrics, config, record, profile_tables(self.folder.profile))
            path.write_text(page(run, self.time), "utf-8")
