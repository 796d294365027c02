"""Which columns of a record may be meant, where they are called other than is expected."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axon.data.records import Record
from axon.tune.turns import Names

SYNONYMS = {
    "messages": ("conversation", "conversations", "dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("question", "query", "input", "instruction", "problem", "context", "source", "user", "q"),
    "completion": ("answer", "response", "output", "reply", "solution", "target", "assistant", "a"),
    "instruction": ("prompt", "question", "query", "task"),
    "output": ("response", "answer", "completion", "target"),
    "chosen": ("preferred", "accepted", "positive", "better", "win", "answer_chosen", "response_chosen"),
    "rejected": ("dispreferred", "negative", "worse", "lose", "answer_rejected", "response_rejected"),
    "ranked": ("answers", "responses", "completions", "ranking"),
    "label": ("class", "category", "target", "desirable", "kto_tag", "is_good", "sentiment"),
    "query": ("question", "anchor", "prompt", "sentence1"),
    "positive": ("document", "passage", "answer", "pos", "sentence2"),
    "text": ("sentence", "content", "document", "review"),
}
"""Column that is expected → names, in lower case, that files have for it, the commonest first."""
CHATS = "messages", "conversations"
"""Columns of whole chats."""


def suggested_columns(record: Record, formats: Sequence[Sequence[str]], names: Names) -> Mapping[str, str]:
    """For the format of which the record seems to have all columns, each → the column that may be meant, but for those
    of the same name: by `SYNONYMS`, and where those are not enough by what the columns hold. Where none is called so
    and no column has messages, those of a format without messages, each as "NAME".

    Args:
        formats: the columns of each. names: what a person has named already.
    """
    found = [meant for columns in formats if (meant := _columns_meant(record, columns, names))]
    found = [meant for meant in found if any(_is_called(own, name) or name in CHATS for name, own in meant.items())]
    if not found:
        return dict.fromkeys(next(one for one in formats if not {*one} & {*CHATS}), "NAME")
    best = max(found, key=lambda meant: sum(_is_called(own, name) for name, own in meant.items()))
    return {name: record_name for name, record_name in best.items() if name != record_name}


def _columns_meant(record: Record, columns: Sequence[str], names: Names) -> dict[str, str]:
    """Column → its name in the record; empty where one has none."""
    meant: dict[str, str] = {name: own for name in columns if (own := names.column(name)) in record}
    for by_name in (True, False):
        for name in columns:
            free = [one for one in record if one not in meant.values() and _may_hold(name, record[one])]
            free = sorted((one for one in free if _is_called(one, name)), key=_rank(name)) if by_name else free
            if name not in meant and free:
                meant[name] = free[0]
    return meant if len(meant) == len(columns) else {}


def _rank(name: str) -> Callable[[str], int]:
    return lambda column: [name, *SYNONYMS.get(name, ())].index(column.lower())


def _is_called(column: str, name: str) -> bool:
    return column.lower() in (name, *SYNONYMS.get(name, ()))


def _may_hold(name: str, value: Any) -> bool:
    """Whether a value is one that the column of this name may have."""
    is_messages = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    if name in CHATS:
        return is_messages
    if name == "ranked":
        return isinstance(value, list) and len(value) > 1
    if name == "label":
        return isinstance(value, bool | int | str)
    is_text = isinstance(value, str) and bool(value)
    return is_text or (is_messages and name in ("prompt", "completion", "chosen", "rejected"))
