"""Schedules as text that a person can read and write."""

import re
from dataclasses import dataclass

from axon.disk import check_paths, named, reading
from axon.errors import UserError, suggest
from axon.fields import FilePath
from axon.parallel.pipeline.check import check
from axon.parallel.pipeline.chunks import PLACEMENTS, Chunks
from axon.parallel.pipeline.order import ACTIONS
from axon.parallel.pipeline.table import LETTERS, Action, Cell, Table, Work

_CELL = re.compile(r"([A-Z])([0-9]{1,6})(?:/([0-9]{1,6}))?")
_SETTINGS = {"stages": "", "microbatches": "", "virtual": "1", "placement": "loop", "flush": "yes"}
"""What a file may say about its table, and what it means if it does not."""


@dataclass(frozen=True)
class FromFile:
    """A schedule of one's own: a table as text, which is checked as every other is.

        stages 2
        microbatches 2
        virtual 1        # chunks of the model on each stage; may be left out
        placement loop   # of chunks: loop or V; may be left out
        flush yes        # no: the table is one period of a schedule that goes on; may be left out

        F0  .
        F1  F0
        .   B0
        B0  F1
        .   B1
        B1  .

    A line is a tick and a column a stage. `F3` is the forward of microbatch 3, `B3` its whole backward, `I3` and `W3`
    the backward of inputs and of weights, `F3/1` by the stage's chunk 1, and `.` nothing. A result can be used from
    the next line on. What follows a `#` is not read.

    Attributes:
        path: of the file, which is for one number of stages and of microbatches.
    """

    path: FilePath

    def __post_init__(self):
        check_paths(self)

    @property
    def virtual(self) -> int:
        """As many chunks on each stage as the file says."""
        return self._read().chunks.virtual

    def table(self, stages: int, microbatches: int) -> Table:
        table = self._read()
        asked = {
            "stages": (table.stages, stages, "the mesh axis 'pipe'"),
            "microbatches": (table.microbatches, microbatches, "Layout.microbatches"),
        }
        for name, (found, wanted, where) in asked.items():
            if found != wanted:
                raise UserError(
                    f"{self.path} is a schedule for {found} {name}, and {where} is {wanted}. Set that to {found}, or "
                    f"write a table for {wanted}"
                )
        return table

    def _read(self) -> Table:
        path = named(self.path, "FromFile.path")
        try:
            with reading(path):
                text = path.read_text(encoding="utf-8-sig")
        except UserError as error:
            raise UserError(f"FromFile.path: {error}") from error
        return parse(text, str(path))


def write(table: Table) -> str:
    """The table as the text that `FromFile` reads."""
    chunks = table.chunks
    settings = (chunks.stages, table.microbatches, chunks.virtual, chunks.placement, "yes" if table.flush else "no")
    head = [f"{name} {value}" for name, value in zip(_SETTINGS, settings, strict=True)]
    grid = [["."] * table.stages for _ in range(table.ticks)]
    for tick, stage, work in table.cells():
        grid[tick][stage] = str(work)
    width = max(len(word) for line in grid for word in line)
    return "\n".join([*head, "", *(" ".join(word.ljust(width) for word in line).rstrip() for line in grid), ""])


def parse(text: str, where: str) -> Table:
    """The table that a text says. `where` names it in messages.

    Raises:
        UserError: a line that is neither a setting nor a tick, or a table that `check` refuses; with line and tick.
    """
    settings, lines = {}, []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words and words[0].isalpha() and words[0].islower():
            _set(settings, words, lines, f"{where}:{number}")
        elif words:
            lines.append((number, words))
    table = _table(_SETTINGS | settings, lines, where)
    try:
        check(table)
    except UserError as error:
        raise UserError(f"{where}: {error} (tick 0 is line {lines[0][0]})") from None
    return table


def _set(settings: dict[str, str], words: list[str], lines: list, at: str) -> None:
    name = words[0]
    if name not in _SETTINGS:
        raise UserError(f"{at}: unknown setting {name!r} of a schedule.{suggest(name, _SETTINGS)}")
    if name in settings:
        raise UserError(f"{at}: {name} is set a second time: keep one of the two lines")
    if lines or len(words) != 2:
        raise UserError(f"{at}: expected `{name} VALUE`, before the first tick; got {' '.join(words)!r}")
    settings[name] = words[1]


def _table(settings: dict[str, str], lines: list[tuple[int, list[str]]], where: str) -> Table:
    stages, microbatches, virtual = (_count(settings, name, where) for name in ("stages", "microbatches", "virtual"))
    for name, known in (("placement", PLACEMENTS), ("flush", ("yes", "no"))):
        if settings[name] not in known:
            raise UserError(f"{where}: {name} is {settings[name]!r}; must be {' or '.join(known)}")
    if not lines:
        raise UserError(f"{where}: the schedule has no ticks: write one line for each, with a cell for each stage")
    cells = [
        Cell(tick, stage, work)
        for tick, (number, words) in enumerate(lines)
        for stage, work in enumerate(_works(words, stages, f"{where}:{number}"))
    ]
    return Table.of(cells, microbatches, Chunks(stages, virtual, settings["placement"]), settings["flush"] == "yes")


def _count(settings: dict[str, str], name: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", settings[name]):
        got = f"got {settings[name]!r}" if settings[name] else "there is no such line"
        raise UserError(f"{where}: expected `{name} NUMBER`, at least 1, before the first tick; {got}")
    return int(settings[name])


def _works(words: list[str], stages: int, at: str) -> list[Work]:
    if len(words) != stages:
        raise UserError(f"{at}: a tick has a cell for each of {stages} stages; this line has {len(words)}")
    works = []
    for stage, word in enumerate(words):
        found = _CELL.fullmatch(word)
        if word != LETTERS[Action.IDLE] and (not found or found[1] not in ACTIONS):
            raise UserError(
                f"{at}: stage {stage} has {word!r}; expected F, B, I or W with a number, as F3 or F3/1, or ."
            )
        works.append(Work(ACTIONS[found[1]], int(found[2]), int(found[3] or 0)) if found else Work(Action.IDLE, 0))
    return works
