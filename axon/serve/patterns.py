"""How large the regular expressions are that a request brings: a short one may stand for millions of characters."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from axon.errors import UserError

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
