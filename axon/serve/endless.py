"""Whether JSON of a schema can have an end: none has that requires itself within itself, as a node that must have a
child which is a node."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

ROUNDS = 100
"""References that may depend on each other, one after the other; of a longer chain it is not found out."""


def is_endless(schema: Any) -> bool:
    """Whether no text with an end can meet a JSON schema, as far as types, required properties and items, references
    and alternatives say so."""
    targets = {ref: target for ref in _references(schema) if (target := _resolved(schema, ref)) is not None}
    endless = set(targets)
    for _ in range(ROUNDS):
        left = {ref for ref in endless if not _has_end(targets[ref], endless)}
        if left == endless:
            return not _has_end(schema, endless)
        endless = left
    return False


def _has_end(node: Any, endless: set[str]) -> bool:
    """Whether something with an end can meet a part of a schema; `endless`: references that nothing so far can."""
    if not isinstance(node, Mapping):
        return True
    if node.get("$ref") in endless:
        return False
    if not all(_has_end(one, endless) for one in _list(node, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        if (found := _list(node, name)) and not any(_has_end(one, endless) for one in found):
            return False
    return "enum" in node or "const" in node or all(_has_end(one, endless) for one in _required(node))


def _required(node: Mapping[str, Any]) -> list[Any]:
    """The schemas of what an object or a list must have in it; of what may be anything else, none."""
    if node.get("type") == "object" and isinstance(properties := node.get("properties"), Mapping):
        return [properties.get(name) for name in _list(node, "required") if isinstance(name, str)]
    least = node.get("minItems", 0)
    if node.get("type") == "array" and isinstance(least, int) and least > 0:
        first = _list(node, "prefixItems")[:least]
        return first + ([node.get("items")] if least > len(first) else [])
    return []


def _list(node: Mapping[str, Any], name: str) -> list[Any]:
    return found if isinstance(found := node.get(name), list) else []


def _references(tree: Any) -> Iterator[str]:
    """Every reference in a schema to a part of it."""
    if isinstance(tree, Mapping) and isinstance(ref := tree.get("$ref"), str):
        yield ref
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ():
        yield from _references(part)


def _resolved(schema: Any, ref: str) -> Any:
    """What `#/$defs/node` stands for; None: for nothing that is found here."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = schema
    for part in unquote(ref).split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
