"""Where the parts of a model are: its blocks cut into chunks, and these dealt out to the stages of a pipeline."""

from dataclasses import dataclass

LOOP, V = "loop", "V"
PLACEMENTS = (LOOP, V)


@dataclass(frozen=True)
class Chunks:
    """`virtual` chunks of a model on each of `stages` stages.

    A chunk has two numbers: a *logical* one, 0 to `total − 1` in the order of the model, and on its stage one from 0 to
    `virtual − 1`. With the placement "loop" each round of chunks starts on stage 0 again; "V" comes back the way it
    went, so that with two chunks the first and the last are both on stage 0.
    """

    stages: int
    virtual: int = 1
    placement: str = LOOP

    @property
    def total(self) -> int:
        return self.stages * self.virtual

    def logical(self, stage: int, chunk: int) -> int:
        """The logical number of a stage's chunk."""
        return chunk * self.stages + self._place(stage, chunk)

    def home(self, logical: int) -> tuple[int, int]:
        """The stage, and the chunk there: the inverse of `logical`."""
        chunk, place = divmod(logical, self.stages)
        return self._place(place, chunk), chunk

    def _place(self, stage: int, chunk: int) -> int:
        back = self.placement == V and chunk % 2
        return self.stages - 1 - stage if back else stage
