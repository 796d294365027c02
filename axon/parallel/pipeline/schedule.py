"""What a pipeline's schedule is to the rest: something that makes a table for a number of stages and microbatches."""

from typing import Protocol

from axon.parallel.pipeline.table import Table


class Schedule(Protocol):
    """`GPipe`, `OneFOneB`, `Interleaved`, `ZeroBubbleH1`, `ZeroBubbleV`, `DualPipeV`, `TwoBW`, `FromFile`: data, which
    a config names.
    """

    @property
    def virtual(self) -> int:
        """Chunks of the model on each stage."""
        ...

    def table(self, stages: int, microbatches: int) -> Table:
        """Raises `UserError` for numbers for which there is none."""
        ...
