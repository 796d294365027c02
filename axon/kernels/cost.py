"""What a kernel costs, by its formula."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """A kernel's cost, counted from its shapes: floating-point (or integer) operations, and bytes of HBM moved."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte; above a chip's ridge (its peak ÷ its bandwidth) the arithmetic is the limit."""
        return self.flops / self.bytes
