"""Mistakes in a configuration, each with its place, and the error that lists them all."""

from collections.abc import Iterable
from dataclasses import dataclass

from axon.errors import UserError


@dataclass(frozen=True)
class Place:
    """A line of a file; `--set` and a file as a whole have no line."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Mistake:
    """One mistake: what to change, and where."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class ConfigError(UserError):
    """Every mistake found in a configuration, each with its place, in the order of the files' lines."""

    def __init__(self, mistakes: Iterable[Mistake]):
        self.mistakes = tuple(sorted(set(mistakes), key=lambda m: (m.place.file, m.place.line or 0, m.text)))
        lines = [str(mistake) for mistake in self.mistakes]
        heading = [f"{len(lines)} mistakes in the configuration:"] if len(lines) > 1 else []
        super().__init__("\n  ".join(heading + lines))
