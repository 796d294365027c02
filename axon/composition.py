"""Exclusions between the parts of a run: data on the parts, which one function checks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Protocol, runtime_checkable

from axon.errors import UserError

STAGES = "stages of a pipeline"
REPLICAS, ONE_BIT, AVERAGES = "replicas with a state of their own", "compressed momentum", "averaged parameters"
FREEZES = "frozen weights"
ACROSS_LAYERS = "an update across layers"
HOST = "arrays in the host's memory"
SEQUENCE_STATES = "states of sequences"
LATE = "gradients of the batch before"
SKIPS, ROLLS_BACK, REPLAYS = "skipped updates", "rollbacks", "replayed steps"
LOSS_SCALE = "a scaled loss"


@dataclass(frozen=True)
class Part:
    """A part of a run, as far as others are concerned.

    Args:
        name: as a person sets it: `Execution.host = ('optimizer',)`. remedy: what to do to be without it, after "or".
        traits: what others may exclude. excludes: trait of another part → why the two cannot be combined.
    """

    name: str
    remedy: str
    traits: frozenset[str] = frozenset()
    excludes: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Composed(Protocol):
    """A configuration that says what it is for others."""

    @property
    def composition(self) -> tuple[Part, ...]: ...


def parts_of(*configs: object) -> list[Part]:
    """The parts that those of the configurations declare that declare any."""
    return [part for config in configs if isinstance(config, Composed) for part in config.composition]


def check_composition(parts: Iterable[Part]) -> None:
    """Raise `UserError` for the first two parts of which one excludes the other: it names both, and the way out."""
    for one, other in permutations(parts, 2):
        for trait in sorted(one.excludes.keys() & other.traits):
            raise UserError(
                f"{one.name} and {other.name} cannot be combined: {one.excludes[trait]}. {one.remedy[0].upper()}"
                f"{one.remedy[1:]}, or {other.remedy}"
            )
