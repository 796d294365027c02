"""Grammars of a request that would take forever: JSON of a schema without an end, as of a node that must have a child
which is a node; and regular expressions of which a short one may stand for millions of characters."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from axon.errors import UserError

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


LARGEST_PATTERN = 10_000
"""By how many characters a text may grow if its `{m,n}` are written out: llguidance takes seconds for a million."""
_PIECE = re.compile(r"\\[xuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.", re.S)


def patterns_of(tree: Any) -> Iterator[str]:
    """Every regular expression in a JSON schema."""
    nested = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    if isinstance(tree, Mapping):
        yield from (tree[key] for key in ("pattern",) if isinstance(tree.get(key), str))
        if isinstance(properties := tree.get("patternProperties"), Mapping):
            yield from map(str, properties)
    for part in nested:
        yield from patterns_of(part)


def check_pattern(pattern: str, what: str) -> None:
    """Raise `UserError`, which calls it `what`, for a regular expression or grammar with too many repetitions."""
    if (size := _written_out(pattern)) - len(pattern) > LARGEST_PATTERN:
        raise UserError(
            f"{what} has {size:,} characters and classes with its repetitions written out; about "
            f"{LARGEST_PATTERN:,} are allowed. Use + or * where the number does not matter"
        )


def _written_out(pattern: str) -> int:
    """How many characters and classes a regular expression has once its `{m,n}` are written out."""
    groups, last = [0], 0
    for piece in _PIECE.finditer(pattern):
        if piece["least"] is not None:
            times = int((piece["most"] or piece["least"])[:12])
            groups[-1] += last * (times - 1)
            last *= times
        elif piece[0] == "(":
            groups.append(0)
        else:
            last = groups.pop() if piece[0] == ")" and len(groups) > 1 else 1
            groups[-1] += last
    return sum(groups)
