"""Patterns: "batch seq embed, embed mlp -> batch seq mlp", as tuples of names.

`name.role` is the same dimension as `name`, with a row of its own in the layout's table.
"""

from dataclasses import dataclass
from functools import lru_cache

Names = tuple[str, ...]


class PatternError(ValueError):
    """A pattern that does not fit its operands: the message holds both."""


def base(name: str) -> str:
    """`seq` of `seq.residual`."""
    return name.partition(".")[0]


def strip_roles(names: Names) -> Names:
    """The names without their roles."""
    return tuple(map(base, names))


@lru_cache(maxsize=4096)
def parse_names(pattern: str) -> Names:
    """The names of one array, in order: `"batch seq embed"` → `("batch", "seq", "embed")`."""
    names = tuple(pattern.split())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.count(".") > 1:
            raise PatternError(f"{name!r} in pattern {pattern!r} is not an axis name: write letters, digits and _")
    plain = strip_roles(names)
    repeated = next((n for n in plain if plain.count(n) > 1), None)
    if repeated:
        raise PatternError(
            f"axis {repeated!r} occurs twice in {pattern!r}: a second dimension of the same kind has its own name "
            f"(as kv_{repeated} or {repeated}_out)"
        )
    return names


@dataclass(frozen=True)
class Contraction:
    """A parsed two-operand pattern."""

    text: str
    left: Names
    right: Names
    out: Names

    @property
    def without_ambiguous_roles(self) -> "Contraction":
        """The same with one name for each dimension: that under whose row the work is done.

        Where operands and output call it by different roles, that is the name without one, as `seq` in
        "batch seq mlp, mlp embed -> batch seq.residual embed": the result is moved to the other row afterwards.
        """
        called: dict[str, set[str]] = {}
        for name in self.left + self.right + self.out:
            called.setdefault(base(name), set()).add(name)
        chosen = {plain: plain if len(names) > 1 else next(iter(names)) for plain, names in called.items()}
        sides = (tuple(chosen[base(n)] for n in names) for names in (self.left, self.right, self.out))
        return Contraction(self.text, *sides)


@lru_cache(maxsize=4096)
def parse_einsum(pattern: str) -> Contraction:
    """`"a b, b c -> a c"` as three tuples of names; every name is in the output or in both operands."""
    inputs, arrow, output = pattern.partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2:
        raise PatternError(f"einsum pattern {pattern!r} should read 'names, names -> names'")
    left, right, out = parse_names(sides[0]), parse_names(sides[1]), parse_names(output)
    a, b, o = (set(strip_roles(names)) for names in (left, right, out))
    if missing := o - a - b:
        raise PatternError(f"{_listed(missing)} right of '->' in {pattern!r}, but in neither operand")
    if lost := (a ^ b) - o:
        raise PatternError(f"{_listed(lost)} in one operand of {pattern!r} only, and not right of '->'")
    return Contraction(pattern, left, right, out)


def _listed(names: set[str]) -> str:
    return ", ".join(repr(n) for n in sorted(names))
