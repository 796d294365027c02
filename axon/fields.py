"""Declarations of a configuration's fields: which may change when a run is continued, and which are paths."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any

RESUMABLE = {"resumable": True}
"""Metadata of a field that may differ when a run is continued: where and how steps are computed, how many there are,
what is saved and reported. None of it changes what is learned by more than rounding.

    execution: Execution = field(default=Execution(), metadata=RESUMABLE)
"""

FilePath = Annotated[str, "file"]
"""A path whose content is compared where it matters, so that the path itself is no part of what a run is."""

FolderPath = Annotated[str, "folder"]
"""The path of a folder in which a run writes."""

Location = Annotated[str, "location"]
"""A path, `hf:…`, or a URL of an object store."""

StoreLocation = Annotated[str, "store"]
"""A path, or any URL that TensorStore takes."""

PATHS = (FilePath, FolderPath, Location, StoreLocation)

ABSENT = "absent"
_MODULE = re.compile(r"@([\w<>]+\.)*")
Skip = Callable[[type, dataclasses.Field], bool]
"""Of a class and its field: whether to leave it out, with everything below it."""


@cache
def path_fields(cls: type) -> dict[str, Any]:
    """The fields of a dataclass that are annotated as one of `PATHS`, alone or within a type → which."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {field.name: _declared(hints.get(field.name)) for field in dataclasses.fields(cls)}
    return {name: alias for name, alias in found.items() if alias is not None}


def field_values(config: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Field → value of a dataclass, not copied; of all its fields, or of those with these `names`."""
    names = [field.name for field in dataclasses.fields(config)] if names is None else names
    return {name: getattr(config, name) for name in names}


def may_change(cls: type, field: dataclasses.Field) -> bool:
    """`Skip` for comparing a run with itself as it was recorded."""
    return "resumable" in field.metadata or path_fields(cls).get(field.name) is FilePath


def differs_by_machine(cls: type, field: dataclasses.Field) -> bool:
    """`Skip` for comparing the processes of a run: their paths may differ."""
    return field.name in path_fields(cls)


def differences(old: Any, new: Any, skip: Skip = lambda cls, field: False) -> list[str]:
    """`model.layers: 6 → 8` for every field whose value differs, in the order of the fields, of two trees of
    dataclasses."""
    return [f"{path}: {a} → {b}" for path, a, b in changed(leaves(old, skip), leaves(new, skip))]


def leaves(tree: Any, skip: Skip = lambda cls, field: False) -> dict[str, str]:
    """Path → value as text of each field of a tree of dataclasses: `model` → `@Llama()`, `model.layers` → `6`."""
    return dict(_leaves(tree, "", skip))


def skipped(tree: Any, skip: Skip) -> list[str]:
    """The paths of the fields that `leaves` leaves out, without what is below them."""
    kept, parts, left = leaves(tree, skip), (), []
    for path in leaves(tree):
        if path not in kept and not path.startswith(parts):
            left.append(path)
            parts += (f"{path}.", f"{path}[")
    return left


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Path, value before and value now, where two `leaves` differ; of what differs as a whole, no part of it."""
    parts: tuple[str, ...] = ()
    for path in dict.fromkeys((*before, *now)):
        values = before.get(path, ABSENT), now.get(path, ABSENT)
        if values[0] != values[1] and not path.startswith(parts):
            parts += (f"{path}.", f"{path}[")
            short = [_MODULE.sub("@", value) for value in values]
            a, b = short if short[0] != short[1] else values
            yield path, _brief(a), _brief(b)


def _leaves(value: Any, path: str, skip: Skip) -> Iterator[tuple[str, str]]:
    yield path, _text(value)
    yield from _below(value, path, skip)


def _below(value: Any, path: str, skip: Skip) -> Iterator[tuple[str, str]]:
    """The fields of an object, and of the objects in a container."""
    if _is_object(value):
        values = field_values(value)
        for field in dataclasses.fields(value):
            if not skip(type(value), field):
                yield from _leaves(values[field.name], f"{path}.{field.name}".removeprefix("."), skip)
    for key, item in _items(value):
        yield from _below(item, f"{path}[{key!r}]", skip)


def _text(value: Any) -> str:
    if _is_object(value):
        return f"@{_name(type(value))}()"
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"@{_name(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_text(item)}" for key, item in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _is_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not inspect.isclass(value)


def _declared(hint: Any) -> Any:
    if hint in PATHS:
        return hint
    return next((found for part in typing.get_args(hint) if (found := _declared(part)) is not None), None)


def _brief(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
