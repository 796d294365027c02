"""Patterns of parameters' paths: shell-style, one or several, of which those that begin with `!` leave out."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from axon.errors import UserError, suggest

Patterns = str | tuple[str, ...]


def listed(patterns: Patterns) -> tuple[str, ...]:
    """Each pattern, of one or of several."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def matches(path: str, patterns: Patterns) -> bool:
    """Whether `path` matches one of the patterns, or there are only ones with `!`, and none of those with `!`.

    `('!layers/*', '!norm')` is all but these.
    """
    without = [one[1:] for one in listed(patterns) if one.startswith("!")]
    within = [one for one in listed(patterns) if not one.startswith("!")] or ["*"]
    return any(fnmatchcase(path, one) for one in within) and not any(fnmatchcase(path, one) for one in without)


def check_patterns(where: str, patterns: Patterns, paths: Iterable[str], of: str) -> None:
    """Raise `UserError` for a pattern that matches none of `paths`, and where all together match none."""
    known = list(paths)
    for one in listed(patterns):
        if not any(fnmatchcase(path, one.removeprefix("!")) for path in known):
            raise UserError(f"{where} = {one!r} matches none of the parameters {of}.{suggest(one, known)}")
    if not any(matches(path, patterns) for path in known):
        raise UserError(f"{where} = {patterns!r} together match none of the parameters {of}")
