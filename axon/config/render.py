"""A tree of frozen dataclasses as gin text: every field bound, defaults too."""

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from axon.config.mistakes import ConfigError, Mistake, Place
from axon.config.names import Names
from axon.fields import field_values

_WIDTH = 100


@dataclass(frozen=True)
class Line:
    """One binding of the text, perhaps wrapped; `path` is that of the value in the tree (`model.layers`)."""

    key: str
    value: str
    path: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}"


@dataclass(frozen=True)
class Text:
    """The resolved configuration: import lines, then for each object its bindings."""

    imports: tuple[str, ...]
    objects: tuple[tuple[Line, ...], ...]

    def __str__(self) -> str:
        blocks = [self.imports, *self.objects]
        return "\n\n".join("\n".join(map(str, block)) for block in blocks if block) + "\n"


def render(tree: Any, names: Names) -> Text:
    """The text whose bindings build `tree`; `names` are the bare names that need no import.

    Objects of one class with different values get scopes, named after the field of the first of them.
    Raises ConfigError for a value that gin text cannot express.
    """
    return _Writer(tree, names).text()


class _Writer:
    def __init__(self, tree: Any, names: Names):
        self._names = names
        self._imports: dict[str, str] = {}  # bare name → import line
        self._labels: dict[Any, str] = {}
        self._objects: dict[str, tuple[str, Any]] = {}  # identity of class and values → path of its first occurrence
        self._scopes: dict[str, str] = {}
        self._root = tree
        for path, part in _objects(tree, ""):
            self._objects.setdefault(_identity(part), (path, part))
        for path, part in self._objects.values():
            self._labels[type(part)] = self._label(type(part), path)
        self._choose_scopes()

    def text(self) -> Text:
        objects = tuple(tuple(self._lines(path, part)) for path, part in self._objects.values())
        return Text(tuple(sorted(self._imports.values())), tuple(lines for lines in objects if lines))

    def _lines(self, path: str, part: Any) -> Iterator[Line]:
        for name, value in _fields(part).items():
            key = f"{self._scoped(part)}.{name}"
            inner = f"{path}.{name}".removeprefix(".")
            yield Line(key, self._value(value, inner, len(key) + 3, ""), inner)

    def _scoped(self, part: Any) -> str:
        return self._scopes.get(_identity(part), "") + self._labels[type(part)]

    def _choose_scopes(self) -> None:
        """A scope for every object that shares its class with another, but for the root."""
        classes = [type(part) for _, part in self._objects.values()]
        for identity, (path, part) in self._objects.items():
            if part is self._root or classes.count(type(part)) == 1:
                continue
            scope = "_".join(re.findall(r"[A-Za-z0-9_]+", path))
            while scope + "/" in self._scopes.values():
                scope += "_"
            self._scopes[identity] = scope + "/"

    # Values

    def _value(self, value: Any, path: str, used: int, indent: str) -> str:
        """`value` as text: on one line if it fits after the `used` columns, else one item a line."""
        if _is_object(value):
            return f"@{self._scoped(value)}()"
        if inspect.isclass(value) or inspect.isfunction(value):
            return f"@{self._labels.setdefault(value, self._label(value, path))}"
        if not isinstance(value, Mapping | list | tuple):
            return _literal(value, path)
        first, last = "{}" if isinstance(value, Mapping) else "[]" if isinstance(value, list) else "()"
        inner = indent + "    "
        items = list(self._items(value, path, inner))
        comma = "," if len(items) == 1 and first == "(" else ""
        line = f"{first}{', '.join(items)}{comma}{last}"
        if not items or ("\n" not in line and used + len(line) <= _WIDTH):
            return line
        return "\n".join([first, *(f"{inner}{item}," for item in items), indent + last])

    def _items(self, value: Mapping | list | tuple, path: str, indent: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                label = _literal(key, path) + ": "
                yield label + self._value(item, f"{path}[{key!r}]", len(indent) + len(label) + 1, indent)
        else:
            for n, item in enumerate(value):
                yield self._value(item, f"{path}[{n}]", len(indent) + 1, indent)

    # Names

    def _label(self, target: Any, path: str) -> str:
        """The name for a class or function: Axon's own without, any other with an import line."""
        if target in self._labels:
            return self._labels[target]
        if short := self._names.short_name(target):
            return short
        module, name = target.__module__, target.__name__
        if getattr(importlib.import_module(module), name, None) is not target:
            _refuse(path, f"{target.__qualname__} can be written only if it is defined at the top level of its module.")
        if not self._names.is_known(name) and name not in self._imports:
            self._imports[name] = f"from {module} import {name}"
            return name
        alias = f"{module.replace('.', '_')}_{name}"
        self._imports[alias] = f"from {module} import {name} as {alias}"
        return alias


def _is_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not inspect.isclass(value)


def _fields(part: Any) -> dict[str, Any]:
    return field_values(part, [field.name for field in dataclasses.fields(part) if field.init])


def _objects(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every object in the tree with its path, each before those in it."""
    if _is_object(value):
        yield path, value
    for inner, part in _inside(value, path):
        yield from _objects(part, inner)


def _inside(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if _is_object(value):
        return [(f"{path}.{name}".removeprefix("."), item) for name, item in _fields(value).items()]
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{n}]", item) for n, item in enumerate(value)]
    return []


def _identity(value: Any) -> str:
    """A text that two values share only if their gin text is the same but for scopes."""
    if _is_object(value):
        inner = ", ".join(f"{name}={_identity(item)}" for name, item in _fields(value).items())
        return f"{type(value).__module__}.{type(value).__qualname__}({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_identity(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(_identity, value))}]"
    return repr(value)


def _literal(value: Any, path: str) -> str:
    if isinstance(value, float):
        return _float(float(value), path)
    if value is None or isinstance(value, bool | bytes):
        return repr(value)
    if isinstance(value, int):
        return repr(int(value))
    if not isinstance(value, str | Path):
        _refuse(path, f"a {type(value).__name__} ({value!r:.40}) cannot be written in a configuration file.")
    return repr(str(value))


def _float(value: float, path: str) -> str:
    if math.isnan(value):
        _refuse(path, "nan cannot be written in a configuration file.")
    return repr(value).replace("inf", "1e999")  # the grammar's literals have no name for infinity


def _refuse(path: str, text: str) -> NoReturn:
    raise ConfigError([Mistake(Place(path), text)])
