"""The error for what the user, not the program, has to change."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what a person wrote: shown as one message without a traceback, exit code 2."""


class Unavailable(UserError):
    """A service that a run asks does not answer: the run saves what it has and ends."""


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'data'?` for a mistyped name, else the names there are, sorted, if they are not too many."""
    names = sorted(set(known))
    listed = f" Known: {', '.join(names)}." if 0 < len(names) <= 40 else ""
    return did_you_mean(name, names) or listed


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'data'?` for a mistyped name, in whatever case; empty if none is close."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name.casefold(), {one.casefold() for one in names}, n=1, cutoff=0.6)
    spelled = [one for one in names if one.casefold() in close]
    best = difflib.get_close_matches(name, spelled, n=1, cutoff=0.0)
    return f" Did you mean {best[0]!r}?" if best else ""
