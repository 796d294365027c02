"""JSON that other programs wrote: every field is read with the type and the bounds that it is declared with.

SIZE = integer("[1, 2**31)")
read_field("config.json", config, "hidden_size", SIZE)    # config.json: hidden_size is "32"; must be an integer …
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon.checks import unmet
from axon.disk import reading, reason
from axon.errors import UserError, did_you_mean

DEEPEST = 64
"""Lists and objects within each other, at most."""
_SHOWN = 80


class Required:
    """The default of a field that has none."""


@dataclass(frozen=True)
class Kind:
    """What a value of JSON can be: `expected` in words, whether it `accepts` one, and as which `numbers` it is written.
    `SIZE | NULL` is either."""

    expected: str
    accepts: Callable[[Any], bool]
    numbers: type[int] | type[float] | None = None

    def __or__(self, other: "Kind") -> "Kind":
        either = f"{self.expected} or {other.expected}"
        return Kind(either, lambda one: self.accepts(one) or other.accepts(one), self.numbers or other.numbers)

    def written(self, value: Any) -> Any:
        """A value as those who declare its type read it: 20.0 as 20 where it is an integer, else 20 as 20.0."""
        is_same = type(value) in (int, float) and (self.numbers is float or float(value).is_integer())
        return self.numbers(value) if self.numbers and is_same else value

    def check(self, where: str, name: str, value: Any) -> None:
        """Raise `UserError` unless `value`, of the field `name` in `where`, is of this kind."""
        if not self.accepts(value):
            raise UserError(f"{where}: {name} is {shown(value)}; must be {self.expected}")


def integer(interval: str) -> Kind:
    """An integer in an interval as `check_range` takes it."""
    return Kind(f"an integer in {interval}", lambda value: type(value) is int and not unmet(interval, value), int)


def number(interval: str) -> Kind:
    """A number in an interval; not-a-number is in none, infinity in none that is open at its ends."""
    return Kind(
        f"a number in {interval}", lambda value: type(value) in (int, float) and not unmet(interval, value), float
    )


def one_of(*values: Any) -> Kind:
    """One of some texts, or other values without parts."""
    texts = ", ".join(map(json.dumps, values))
    accepted = [(type(one), one) for one in values]
    return Kind(texts if len(values) == 1 else f"one of {texts}", lambda value: (type(value), value) in accepted)


def list_of(kind: Kind) -> Kind:
    """A list of any length."""
    return Kind(
        f"a list, each of it {kind.expected}", lambda value: type(value) is list and all(map(kind.accepts, value))
    )


def object_of(kind: Kind) -> Kind:
    """An object whose values are of a kind, whatever their names."""
    return Kind(
        f"an object, each value {kind.expected}",
        lambda value: type(value) is dict and all(map(kind.accepts, value.values())),
    )


def object_with(kinds: Mapping[str, Kind]) -> Kind:
    """An object with these fields, and perhaps others."""
    return Kind(
        f"an object with {', '.join(f'{name}, {kind.expected}' for name, kind in kinds.items())}",
        lambda value: (
            type(value) is dict and all(name in value and kind.accepts(value[name]) for name, kind in kinds.items())
        ),
    )


ANY = Kind("anything", lambda value: True)
NULL = Kind("null", lambda value: value is None)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NUMBER = Kind("a finite number", number("(-inf, inf)").accepts)
TEXT = Kind("a text", lambda value: type(value) is str)
OBJECT = Kind("an object", lambda value: type(value) is dict)
FILE_NAME = Kind("the name of a file in the same folder", lambda value: type(value) is str and _is_name(value))
SIZE = integer("[1, 2**31)")
COUNT = integer("[0, 2**31)")


def read_json(path: Path, kind: Kind = OBJECT) -> Any:
    """The value in a file, an object if no other `kind` is given. Raises `UserError` for what is none."""
    with reading(path):
        text = path.read_text(encoding="utf-8")
    return parse_json(text, str(path), kind)


def parse_json(text: str | bytes, where: str, kind: Kind = OBJECT) -> Any:
    """The value of a text, which is in `where`: a file, or a line of one. Raises `UserError` for what is none."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
        depth = _depth(value)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {reason(error)}") from error
    except RecursionError:
        value, depth = None, DEEPEST + 1
    if depth > DEEPEST:
        raise UserError(f"{where} has lists or objects within each other, more than {DEEPEST} deep")
    if not kind.accepts(value):
        raise UserError(f"{where} holds {shown(value)}; must be {kind.expected}")
    return value


def read_field(where: str, content: Mapping[str, Any], name: str, kind: Kind, default: Any = Required) -> Any:
    """The field `name` of what is in `where`, a file or an object in it; `default` where it is absent.

    Raises `UserError` for a value that is not of the `kind`, null too unless `kind` has it, and for a required field
    that is absent.
    """
    if name in content:
        kind.check(where, name, content[name])
        return content[name]
    if default is Required:
        close = did_you_mean(name, content)
        raise UserError(f"{where}: there is no field {name!r}; must be {kind.expected}.{close}")
    return default


def shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _is_name(text: str) -> bool:
    return text not in ("", ".", "..") and not set(text) & set("/\\\0")


def _depth(value: Any) -> int:
    """How many lists and objects are within each other, at most; counted no further than is allowed."""
    depth, level = 0, [value]
    while depth <= DEEPEST and (level := [one for one in level if isinstance(one, (list, dict))]):
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth
