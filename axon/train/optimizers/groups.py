"""Parameter groups: learning rates, decay and freezing by path, in one ordered list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon.checks import check_range
from axon.errors import UserError
from axon.nn import ParamSpec
from axon.path_patterns import Patterns, check_patterns, matches

Parameters = Mapping[str, ParamSpec]
"""Path → specification."""


@dataclass(frozen=True)
class Group:
    """Parameters with a rate or decay of their own. Of several groups the first whose pattern matches applies.

    Args:
        paths: a shell-style pattern for paths of parameters, as "embedding/*" or "*/attention/*", or several; those
            that begin with `!` leave out: ("!*/a", "!*/b") is all but these.
        rate: times the schedule. weight_decay: instead of the optimizer's, and on whatever matches, vectors too; None
            for the optimizer's. frozen: whether they are left unchanged, bit for bit: they have no state, and their
            gradients are not computed.
    """

    paths: Patterns
    rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self):
        check_range(self, "[0, inf)", "rate", "weight_decay")
        if self.frozen and (self.rate != 1 or self.weight_decay is not None):
            raise UserError(
                f"Group of {self.paths!r}: frozen parameters have neither rate nor decay. Leave out rate and "
                "weight_decay, or set frozen to False"
            )


REST = Group("*")
"""The parameters that no group matches."""

UNTRAINED = Group("*", frozen=True)
"""Those that a weight transform freezes (`ParamSpec.trained`): they are in no other."""


def group_of_each(parameters: Parameters, groups: Sequence[Group]) -> dict[str, Group]:
    """Path → its group. Raises `UserError` for one that has none of these parameters."""
    trained = [path for path, spec in parameters.items() if spec.trained]
    for group in groups:
        check_patterns("Group.paths", group.paths, trained, "that this optimizer updates")
    found = {path: next((g for g in groups if matches(path, g.paths)), REST) for path in trained}
    each = {path: found.get(path, UNTRAINED) for path in parameters}
    for group in groups:
        if not any(group is own for own in each.values()):
            raise UserError(
                f"Group.paths = {group.paths!r} has no effect: all that it matches is in groups before it, of which "
                "the first that matches applies. Put it before them, or take it out"
            )
    return each


def frozen_in(parameters: Parameters, groups: Sequence[Group]) -> frozenset[str]:
    """The parameters that a group freezes."""
    return frozenset(path for path, group in group_of_each(parameters, groups).items() if group.frozen)
