"""`Remarks`, what a person should know of the examples that were read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

SHOWN = 3
"""Examples of a kind that are named."""


@dataclass(frozen=True)
class Remarks:
    """Where examples are that are too long, by what is done with them, those that are there already, and those whose
    question is, in another writing; and columns that no record has.

    Args:
        limit: what an example of more positions than is too long. duplicates: what is done with those of `repeated`.
        unread: columns that were named, and that no record so far has.
    """

    limit: str
    duplicates: Literal["keep", "drop"]
    unread: set[str] = field(default_factory=set)
    too_long: Mapping[str, list[str]] = field(default_factory=lambda: {"dropped": [], "cut": []})
    repeated: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        for what, places in self.too_long.items():
            yield from _line(places, f"of more than {self.limit} positions are {what}")
        kept = "kept" if self.duplicates == "keep" else "dropped"
        yield from _line(self.repeated, f"are there already, id for id, and are {kept}")
        writing = "have the question of others but for case, white space or Unicode's forms, and are in their split"
        yield from _line(self.rewritten, writing)
        if self.unread:
            yield f"columns that are named in `columns`, and no record has: {', '.join(sorted(self.unread))}"


def _line(places: Sequence[str], what: str) -> Iterator[str]:
    if places:
        yield f"{len(places):,} examples {what}: {', '.join([*places[:SHOWN], *['…'] * (len(places) > SHOWN)])}"
