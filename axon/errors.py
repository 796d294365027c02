"""The error for what the user, not the program, has to change."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what a person wrote: shown as one message without a traceback, exit code 2."""


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'data'?` for a mistyped name, else the names there are, sorted, if they are not too many."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if 0 < len(names) <= 30 else ""
