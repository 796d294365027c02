"""The differences of two trees, as text."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axon.config.types import shown


def differences(old: Any, new: Any, ignore: Sequence[str] = ()) -> list[str]:
    """`model.layers: 6 → 8` for every field whose value differs, in the order of the fields.

    Args:
      old, new: two trees of dataclasses.
      ignore: paths of fields (`steps`, `data.threads`) that may differ, with everything below them.
    """
    return list(_between(old, new, "", frozenset(ignore)))


def _between(old: Any, new: Any, path: str, ignore: frozenset[str]) -> Iterator[str]:
    if path in ignore or (type(old) is type(new) and old == new):
        return
    parts = list(_parts(old, new, path))
    if not parts:
        yield f"{path}: {shown(old)} → {shown(new)}"
    for inner, before, after in parts:
        yield from _between(before, after, inner, ignore)


def _parts(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Corresponding parts of two values with the same structure; none if it differs."""
    if type(old) is not type(new) or inspect.isclass(old):
        return
    if dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            yield f"{path}.{field.name}".removeprefix("."), getattr(old, field.name), getattr(new, field.name)
    elif isinstance(old, Mapping) and old.keys() == new.keys():
        for key in old:
            yield f"{path}[{key!r}]", old[key], new[key]
    elif isinstance(old, list | tuple) and len(old) == len(new):
        for n, (before, after) in enumerate(zip(old, new, strict=True)):
            yield f"{path}[{n}]", before, after
