"""Ranges of configured numbers."""

import re
from dataclasses import fields
from typing import Any, get_args

from axon.errors import UserError
from axon.fields import field_values

_INTERVAL = re.compile(r"([\[(])(.+), (.+)([\])])")
_LARGE = 2**24
"""For an interval up to at least this, the message for a smaller number names the lower bound alone."""


def check_range(config: Any, interval: str, *names: str) -> None:
    """Raise `UserError` unless each of these fields of a dataclass is a number in `interval`, or None.

        check_range(self, "[0, 1)", "b1", "b2")    # AdamW.b1 is 1.2; must be in [0, 1)

    A bound is a number, a power (`2**32`) or `inf`. NaN and infinity are in no interval that is open at its ends, and
    an integer must fit 64 bits: neither an array nor a library takes a larger one.
    """
    hints = {field.name: field.type for field in fields(config)}
    for name, value in field_values(config, names).items():
        if value is not None and (wanted := unmet(interval, value)):
            optional = ", or None" if type(None) in get_args(hints[name]) else ""
            raise UserError(f"{type(config).__name__}.{name} is {value!r}; must be {wanted}{optional}")


def unmet(interval: str, value: float) -> str:
    """The condition of `interval`, as `check_range` takes it, that `value` does not meet; empty if it does."""
    if isinstance(value, int):
        interval = interval.replace("inf", "2**63")
    parts = _INTERVAL.fullmatch(interval)
    assert parts, interval
    first, low, high, last = parts.groups()
    above = value > _number(low) or (first == "[" and value == _number(low))
    below = value < _number(high) or (last == "]" and value == _number(high))
    if above and below:
        return ""
    if below and _number(high) >= _LARGE:
        return f"{'at least' if first == '[' else 'above'} {low}"
    return f"in {interval}"


def _number(bound: str) -> float:
    base, _, power = bound.partition("**")
    return float(base) ** float(power or 1)
