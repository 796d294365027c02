"""Which columns may be meant: by their names and by what they hold, never by their order alone."""

import pytest

from axon.tune.column_names import suggested_columns
from axon.tune.formats import CHATS, LABELLED, LABELLED_TEXTS, PAIRS, TEXT_PAIRS
from axon.tune.turns import Names

TALK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("formats", "record", "expected"),
    [
        (CHATS, {"id": 3, "answer": "b", "question": "a"}, {"prompt": "question", "completion": "answer"}),
        (CHATS, {"Instruction": "a", "Response": "b"}, {"prompt": "Instruction", "completion": "Response"}),
        (CHATS, {"prompt": "a", "gold": "b"}, {"completion": "gold"}),
        (CHATS, {"id": "x", "thread": TALK}, {"messages": "thread"}),
        (CHATS, {"question": "a", "dialog": TALK}, {"messages": "dialog"}),
        (CHATS, {"id": "x", "text": "y"}, {"prompt": "NAME", "completion": "NAME"}),
        (PAIRS, {"prompt": "a", "better": "b", "worse": "c"}, {"chosen": "better", "rejected": "worse"}),
        (LABELLED, {"messages": TALK, "kto_tag": True}, {"label": "kto_tag"}),
        (LABELLED_TEXTS, {"review": "a", "sentiment": 1}, {"text": "review", "label": "sentiment"}),
        (TEXT_PAIRS, {"anchor": "a", "pos": "b"}, {"query": "anchor", "positive": "pos"}),
    ],
)
def test_the_mapping_to_write_is_by_synonyms_and_values(formats, record, expected):
    assert suggested_columns(record, [one.columns for one in formats], Names()) == expected


def test_what_a_person_has_named_stays():
    names = Names({"prompt": "q"})
    assert suggested_columns({"q": "a", "reply": "b"}, [("prompt", "completion")], names) == {
        "prompt": "q",
        "completion": "reply",
    }
