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

    @property
    def examples(self) -> dict[str, Sequence[str]]:
        """By what is said of them, where all the examples are."""
        kept = "kept" if self.duplicates == "keep" else "dropped"
        writing = "have the question of others but for case, white space or Unicode's forms, and are in their split"
        found = {f"of more than {self.limit} positions are {what}": own for what, own in self.too_long.items()}
        found |= {f"are there already, id for id, and are {kept}": self.repeated, writing: self.rewritten}
        return {what: places for what, places in found.items() if places}

    def lines(self) -> Iterator[str]:
        for what, places in self.examples.items():
            first = ", ".join([*places[:SHOWN], *["…"] * (len(places) > SHOWN)])
            yield f"{len(places):,} examples {what}: {first}"
        if self.unread:
            yield f"columns that are named in `columns`, and no record has: {', '.join(sorted(self.unread))}"
