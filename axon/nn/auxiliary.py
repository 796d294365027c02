"""Results of a block besides its output: losses, and statistics from which a step updates its variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Auxiliary:
    """Sums over the tokens of a part of the batch; `Auxiliary()` is that of a block that has none.

    Args:
        losses: name → scalar, already weighted; an objective adds them to its own, divided by the tokens.
        statistics: path of a module's variable, relative to the block → the sum that updates it, as the tokens of
            each expert for a router's bias.
    """

    losses: dict[str, Array] = field(default_factory=dict)
    statistics: dict[str, Array] = field(default_factory=dict)

    def within(self, path: str) -> "Auxiliary":
        """The same of a module at `path`, as the module that holds it calls it."""
        return Auxiliary(self.losses, {f"{path}/{name}": value for name, value in self.statistics.items()})

    def __add__(self, other: "Auxiliary") -> "Auxiliary":
        """Losses summed by name, and the statistics of both."""
        losses = dict(self.losses)
        for name, value in other.losses.items():
            losses[name] = losses[name] + value if name in losses else value
        return Auxiliary(losses, self.statistics | other.statistics)


def over_layers(kinds: Mapping[str, Auxiliary]) -> Auxiliary:
    """Of each kind of block, with a leading axis `layers` → losses summed by name, and statistics as they are."""
    losses: dict[str, Array] = {}
    for one in kinds.values():
        for name, values in one.losses.items():
            total = jnp.sum(values)
            losses[name] = losses[name] + total if name in losses else total
    statistics = {path: value for kind, one in kinds.items() for path, value in one.within(kind).statistics.items()}
    return Auxiliary(losses, statistics)
