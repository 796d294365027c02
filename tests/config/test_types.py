"""Which values fit which annotations, and as what."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NewType, Optional, Protocol, TypeVar, Union, runtime_checkable

import pytest

from axon.config.types import Mismatch, describe, fit


@dataclass(frozen=True)
class Point:
    x: int = 0

    def area(self) -> float:
        return 0.0


class Shape(Protocol):
    x: int

    def area(self) -> float: ...


@runtime_checkable
class Named(Protocol):
    @property
    def name(self) -> str: ...


def function(x: int) -> int:
    return x


FITS = [
    (3, int, 3),
    (3, float, 3.0),
    (2.5, float, 2.5),
    ("a", str, "a"),
    (True, bool, True),
    (None, None, None),
    (None, int | None, None),
    (3, Optional[int], 3),  # noqa: UP045
    (3, Union[str, int], 3),  # noqa: UP007
    (3, float | int, 3),
    (True, int | bool, True),
    ("a/b", Path, Path("a/b")),
    ("a/b", Path | str, "a/b"),
    ("b", Literal["a", "b"], "b"),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, "a"], tuple[int, str], (1, "a")),
    ([], tuple[()], ()),
    ((1, 2), list[int], [1, 2]),
    ((1, 2), list, [1, 2]),
    ([1], tuple, (1,)),
    ([1, 2], Sequence[float], (1.0, 2.0)),
    ({"a": 1}, Mapping[str, float], {"a": 1.0}),
    ({"a": [1]}, dict[str, tuple[int, ...]], {"a": (1,)}),
    ({}, dict, {}),
    (["a"], str | tuple[str, ...], ("a",)),
    (Point(1), Point, Point(1)),
    (Point(1), Shape, Point(1)),
    (Point, type[Point], Point),
    (Point, type, Point),
    (function, Callable[[int], int], function),
    (function, Callable, function),
    ([1], Any, [1]),
    ([1], object, [1]),
    ([1], TypeVar("T"), [1]),
    (3, NewType("Nats", float), 3.0),
]

MISFITS = [
    (True, int, "expected int, got True."),
    (1.0, int, "expected int, got 1.0."),
    (True, float, "expected float, got True."),
    ("3", float, "expected float, got '3'."),
    (10**400, float, "expected float, got 1000"),
    (0, bool, "expected bool, got 0."),
    (0, None, "expected None, got 0."),
    ("a", int | None, "expected int | None, got 'a'."),
    ("c", Literal["a", 1], "expected 'a' | 1, got 'c'."),
    (True, Literal[1], "expected 1, got True."),
    ("abc", tuple[str, ...], "expected tuple[str, ...], got 'abc'."),
    ([1], tuple[int, int], "expected tuple[int, int], got [1]."),
    ([1], tuple[()], "expected tuple, got [1]."),
    ([], Mapping[str, int], "expected Mapping[str, int], got []."),
    ({1: 1}, Mapping[str, int], "expected str, got 1."),
    (Point(), int, "expected int, got @Point()."),
    (3, Point, "expected Point, got 3. Write @Point()."),
    (Point, Point, "expected Point, got @Point. Did you mean @Point()?"),
    (3, Shape, "expected Shape, got 3."),
    (Point, Shape, "expected Shape, got @Point."),
    (Point(), Named, "expected Named, got @Point()."),
    (int, type[Point], "expected type[Point], got @int."),
    (3, Callable[[int], str], "expected Callable[[int], str], got 3."),
    (list(range(99)), str, "expected str, got [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19"),
]


@pytest.mark.parametrize(("value", "hint", "expected"), FITS)
def test_a_value_that_fits_becomes_what_its_annotation_says(value, hint, expected):
    fitted = fit(value, hint)
    assert fitted == expected
    assert type(fitted) is type(expected)


@pytest.mark.parametrize(("value", "hint", "message"), MISFITS)
def test_a_value_that_does_not_fit_is_refused_with_both_types(value, hint, message):
    with pytest.raises(Mismatch) as caught:
        fit(value, hint)
    assert str(caught.value).startswith(message)


def test_a_misfit_inside_a_value_says_where():
    with pytest.raises(Mismatch) as caught:
        fit({"a": [(1, "x"), (2, 3)]}, dict[str, tuple[tuple[int, str], ...]])
    assert caught.value.at == "['a'][1][1]"
    assert str(caught.value) == "expected str, got 3."


def test_annotations_are_described_as_they_are_written():
    assert describe(Mapping[str, str | tuple[int, ...] | None]) == "Mapping[str, str | tuple[int, ...] | None]"
    assert describe(type[Point]) == "type[Point]"
    assert describe(Callable[..., int]) == "Callable[..., int]"


def test_a_property_is_not_evaluated():
    class Late:
        @property
        def name(self) -> str:
            raise OSError("nobody asked")

    late = Late()
    assert fit(late, Named) is late
