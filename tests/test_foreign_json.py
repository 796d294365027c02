"""JSON of others: what is taken, and how what is not is said."""

import json

import pytest

from axon.errors import UserError
from axon.foreign_json import (
    ANY,
    COUNT,
    FILE_NAME,
    FLAG,
    NULL,
    OBJECT,
    SIZE,
    TEXT,
    integer,
    list_of,
    number,
    object_of,
    one_of,
    read_field,
    read_json,
)

SHARE = number("[0, 1]")
VALUES = [None, True, 0, 1, -1, 0.5, 1.0, float("nan"), float("inf"), 10**400, "", "2", "../x", [], [1], ["a"], {}]
VALUES += [{"a": 1}, {"a": "b"}, "\ud800", [[[[]]]]]


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        (SIZE, [1]),
        (COUNT, [0, 1]),
        (integer("[-1, 2**31)"), [0, 1, -1]),
        (number("[0, inf)"), [0, 1, 0.5, 1.0]),
        (SHARE | NULL, [None, 0, 1, 0.5, 1.0]),
        (FLAG, [True]),
        (TEXT, ["", "2", "../x", "\ud800"]),
        (FILE_NAME, ["2", "\ud800"]),
        (one_of("2", 1), [1, "2"]),
        (one_of(None, True), [None, True]),
        (list_of(SIZE), [[], [1]]),
        (object_of(TEXT), [{}, {"a": "b"}]),
        (OBJECT, [{}, {"a": 1}, {"a": "b"}]),
    ],
    ids=lambda value: getattr(value, "expected", ""),
)
def test_a_kind_accepts_its_values_and_refuses_all_others_by_field_and_value(kind, accepted):
    for value in VALUES:
        if any(type(value) is type(one) and value == one for one in accepted):
            assert read_field("a.json", {"name": value}, "name", kind) is value
        else:
            with pytest.raises(UserError) as caught:
                read_field("a.json", {"name": value}, "name", kind)
            assert str(caught.value).startswith("a.json: name is ")
            assert str(caught.value).endswith(f"; must be {kind.expected}")
            str(caught.value).encode()


def test_an_absent_field_is_its_default_or_is_named_with_the_one_that_was_meant():
    assert read_field("a.json", {}, "hidden_size", SIZE, 7) == 7
    with pytest.raises(UserError, match=r"no field 'hidden_size'; must be an integer .*Did you mean 'hiden_size'\?"):
        read_field("a.json", {"hiden_size": 3}, "hidden_size", SIZE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff{}", "it is not UTF-8"),
        (b"[1]", r"holds \[1\]; must be an object"),
        (b"5", "holds 5; must be an object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "more than 64 deep"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 64 deep"),
    ],
    ids=range(8),
)
def test_a_file_that_is_no_object_is_refused_by_its_path(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=message) as caught:
        read_json(path)
    assert str(caught.value).startswith(str(path))


def test_what_is_nested_as_deep_as_is_allowed_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 63 + "{}" + "]" * 63)
    assert read_json(path, ANY) == json.loads(path.read_text())
