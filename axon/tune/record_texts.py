"""`RecordTexts`, the texts of records, of which a tokenizer is trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from axon.data.records import RecordSource


@dataclass(frozen=True)
class RecordTexts:
    """The texts of records, as a source of documents."""

    source: RecordSource

    @property
    def name(self) -> str:
        return self.source.name

    def key(self) -> str:
        return self.source.key()

    def texts(self) -> Iterator[str]:
        """One document for each record: all texts in it, a line each."""
        for _, record in self.source.records():
            yield "\n".join(_texts([*record.values()]))


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _texts(part)
