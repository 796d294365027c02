"""A little house of dataclasses for the tests of configuration, in the place of Axon's own modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from axon.errors import UserError

__all__ = [
    "Bpe",
    "Cosine",
    "Data",
    "Layout",
    "Model",
    "Net",
    "Optimizer",
    "Sources",
    "Train",
    "doubled",
    "taken",
    "zero",
]


class Model(Protocol):
    """What has layers."""

    layers: int


@dataclass(frozen=True)
class Layout:
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1})
    rows: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    zero: int = 0
    auto: bool = False

    def __post_init__(self):
        if not 0 <= self.zero <= 3:
            raise UserError(f"zero is {self.zero}; it is 0, 1, 2 or 3")


@dataclass(frozen=True)
class Bpe:
    vocab: int = 256


@dataclass(frozen=True)
class Sources:
    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Data:
    seq: int
    batch: int
    sources: tuple[Sources, ...] = (Sources("text"),)
    tokenizer: Bpe = Bpe()
    folder: Path | None = None


@dataclass(frozen=True)
class Cosine:
    peak: float = 3e-4
    warmup: int = 10

    @property
    def end(self) -> float:
        """Always 0."""
        return 0.0


@dataclass(frozen=True)
class Optimizer:
    schedule: Cosine = Cosine()
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Net:
    layers: int
    kind: Literal["plain", "gated"] = "plain"
    inner: "Net | None" = None


@dataclass(frozen=True)
class Train:
    model: Model
    data: Data
    layout: Layout = Layout()
    optimizer: Optimizer = Optimizer()
    steps: int = 100
    teacher: Model | Data | None = None
    transform: Callable[[int], int] | None = None
    block: type[Net] | None = None
    extra: Any = None


def zero(stage: int, axis: str = "data") -> dict[str, str]:
    """Rows made by a function."""
    return {"embed": axis} if stage else {}


def doubled(x: int) -> int:
    return 2 * x


def taken(layers: int) -> Net:
    """An object made by a function."""
    return Net(layers)
