"""Checking a value against a field's annotation, and fitting it: int → float, list → tuple, str → Path."""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from axon.config.parameters import is_frozen
from axon.disk import expanded
from axon.errors import did_you_mean


class Mismatch(Exception):
    """A value does not fit its annotation; `at` is where inside the value (`['data']`, `[2]`)."""

    def __init__(self, value: Any, hint: Any, at: str):
        super().__init__(f"expected {describe(hint)}, got {shown(value)}.{_remedy(value, hint)}")
        self.at = at


def fit(value: Any, hint: Any, at: str = "") -> Any:
    """`value` converted to `hint`: an int to a float, a list to a tuple, a str to a Path, where so annotated.

    Raises Mismatch for anything else. A bool is not an int.
    """
    hint = _plain(hint)
    kind = typing.get_origin(hint) or hint
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return value
    if kind in (Union, types.UnionType):
        return _fit_union(value, hint, at)
    if kind is Literal:
        return _require(any(value == arg and type(value) is type(arg) for arg in hint.__args__), value, hint, at)
    if kind in (tuple, list, Sequence):
        return _fit_sequence(value, hint, kind, at)
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return _fit_mapping(value, hint, at)
    if kind is type:
        wanted = typing.get_args(hint)
        is_class = inspect.isclass(value) and (
            not wanted or not inspect.isclass(wanted[0]) or issubclass(value, wanted)
        )
        return _require(is_class, value, hint, at)
    if kind in (Callable, typing.Callable):
        return _require(callable(value), value, hint, at)
    return _fit_class(value, kind, at)


def _plain(hint: Any) -> Any:
    """The type behind `type Rows = Mapping[...]` and `NewType("Nats", float)`."""
    return getattr(hint, "__value__", getattr(hint, "__supertype__", hint))


def _require(good: bool, value: Any, hint: Any, at: str) -> Any:
    if not good:
        raise Mismatch(value, hint, at)
    return value


def _fit_union(value: Any, hint: Any, at: str) -> Any:
    """Fitted to the member that leaves the value unchanged, else to the first that accepts it."""
    fits = []
    for member in typing.get_args(hint):
        try:
            fits.append(fit(value, member, at))
        except Mismatch:
            continue
    _require(bool(fits), value, hint, at)
    return next((fitted for fitted in fits if type(fitted) is type(value)), fits[0])


def _fit_sequence(value: Any, hint: Any, kind: Any, at: str) -> Any:
    _require(isinstance(value, list | tuple), value, hint, at)
    args = typing.get_args(hint)
    if kind is tuple and hint is not tuple and Ellipsis not in args:
        members = list(args)
        _require(len(members) == len(value), value, hint, at)
    else:
        members = [args[0] if args else Any] * len(value)
    items = (fit(item, member, f"{at}[{n}]") for n, (item, member) in enumerate(zip(value, members, strict=True)))
    return list(items) if kind is list else tuple(items)


def _fit_mapping(value: Any, hint: Any, at: str) -> dict:
    _require(isinstance(value, Mapping), value, hint, at)
    key_hint, item_hint = typing.get_args(hint) or (Any, Any)
    return {fit(key, key_hint, at): fit(item, item_hint, f"{at}[{key!r}]") for key, item in value.items()}


def _fit_class(value: Any, wanted: Any, at: str) -> Any:
    if wanted is None:
        wanted = type(None)
    if wanted is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if wanted is Path and isinstance(value, str):
        return Path(expanded(value, "the path"))
    if wanted is int:
        return _require(type(value) is int, value, wanted, at)
    if _is_protocol(wanted):
        return _require(not inspect.isclass(value) and _follows(value, wanted), value, wanted, at)
    return _require(isinstance(value, wanted), value, wanted, at)


def _is_protocol(kind: Any) -> bool:
    return getattr(kind, "_is_protocol", False)


def _follows(value: Any, protocol: type) -> bool:
    """Whether a value has every public member of a Protocol; no property is evaluated, which may read a file.

    (isinstance would need `runtime_checkable`.)
    """
    layers = [base for base in protocol.__mro__ if _is_protocol(base)]
    members = {name for base in layers for name in (*vars(base), *inspect.get_annotations(base))}
    public = (name for name in members if not name.startswith("_"))
    return all(hasattr(type(value), name) or hasattr(value, name) for name in public)


def describe(hint: Any) -> str:
    """An annotation as it is written in source."""
    hint = _plain(hint)
    args, kind = typing.get_args(hint), typing.get_origin(hint)
    if kind in (Union, types.UnionType):
        return " | ".join(map(describe, args))
    if kind is Literal:
        return " | ".join(map(repr, args))
    if hint in (None, type(None)):
        return "None"
    if hint is Ellipsis:
        return "..."
    if isinstance(hint, list):
        return f"[{_joined(hint)}]"
    name = getattr(kind or hint, "__name__", str(hint))
    return f"{name}[{_joined(args)}]" if args else name


def _joined(hints: Iterable[Any]) -> str:
    return ", ".join(map(describe, hints))


def shown(value: Any) -> str:
    """A value, briefly, as it is written in a file."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"@{value.__name__}"
    if dataclasses.is_dataclass(value):
        return f"@{type(value).__name__}()"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remedy(value: Any, hint: Any) -> str:
    if typing.get_origin(hint) is Literal and isinstance(value, str):
        return did_you_mean(value, [arg for arg in hint.__args__ if isinstance(arg, str)])
    if inspect.isclass(value) and is_frozen(value):
        return f" Did you mean @{value.__name__}()?"
    if inspect.isclass(hint) and is_frozen(hint):
        return f" Write @{hint.__name__}()."
    return ""
