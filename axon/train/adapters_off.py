"""A frozen model that needs no arrays of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdaptersOff:
    """The model that is trained, without the adapters of `Train.transforms`, as one of `Train.references`."""
