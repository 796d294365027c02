"""Schedules of stages that each have one chunk of the model: GPipe, 1F1B, and 1F1B without a flush."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from axon.errors import UserError
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.order import from_orders
from axon.parallel.pipeline.table import Action, Table, Work


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards in reverse, as autodiff does it (Huang et al. 2019, arXiv:1811.06965).

    Bubble `(p − 1)/m` of the time that m microbatches take; every stage keeps all m.
    """

    @property
    def virtual(self) -> int:
        """One chunk on each stage, always; of `Interleaved` the number can be chosen."""
        return 1

    def table(self, stages: int, microbatches: int) -> Table:
        forwards = [Work(Action.FORWARD, i) for i in range(microbatches)]
        backwards = [Work(Action.BACKWARD, i) for i in reversed(range(microbatches))]
        return from_orders([forwards + backwards] * stages, microbatches, Chunks(stages))


@dataclass(frozen=True)
class OneFOneB:
    """Each backward as soon as it can be, and one forward after it (PipeDream-flush: Narayanan et al.,
    arXiv:2006.09503, section 2.2).

    Bubble `(p − 1)/m`, as GPipe's; stage s keeps `min(m, p − s)` microbatches, however many there are.
    """

    @property
    def virtual(self) -> int:
        """One chunk on each stage, always; of `Interleaved` the number can be chosen."""
        return 1

    def table(self, stages: int, microbatches: int) -> Table:
        forwards = [Work(Action.FORWARD, i) for i in range(microbatches)]
        backwards = [Work(Action.BACKWARD, i) for i in range(microbatches)]
        orders = [one_f_one_b(forwards, backwards, stages - stage) for stage in range(stages)]
        return from_orders(orders, microbatches, Chunks(stages))


def one_f_one_b(forwards: Sequence[Work], backwards: Sequence[Work], ahead: int) -> list[Work]:
    """One stage's work: so many forwards ahead, then a backward and a forward in turn, then the backwards left."""
    rest = zip_longest(backwards, forwards[ahead:])
    return [*forwards[:ahead], *(work for pair in rest for work in pair if work)]


@dataclass(frozen=True)
class TwoBW:
    """1F1B that never flushes: the next batch starts while this one ends (PipeDream-2BW, arXiv:2006.09503, section 3).

    It changes the numerics. A batch that is still in flight when the weights are updated goes on with the weights
    that it began with, so that two versions are kept, and its gradient comes one update late:
    `W(t+1) = W(t) − lr · update(∇f(W(t−1)))`.

    No bubble in any period; only the first batch of a run fills the pipeline and the last one drains it. Stage s keeps
    `p − s` microbatches. With fewer microbatches than stages more than two versions would be in use: refused.
    """

    @property
    def virtual(self) -> int:
        """One chunk on each stage, always; of `Interleaved` the number can be chosen."""
        return 1

    def table(self, stages: int, microbatches: int) -> Table:
        """One period. On stage s forward i begins at tick 2i + s, and backward i at 2i + 2p − 1 − s, of all time."""
        if microbatches < stages:
            raise UserError(
                f"TwoBW keeps two versions of the weights, which is enough for at least as many microbatches as "
                f"stages; there are {microbatches} microbatches and {stages} stages. Use {stages} microbatches or more"
            )
        tick, stage = np.indices((2 * microbatches, stages))
        forward = (tick - stage) % 2 == 0
        begun = np.where(forward, tick - stage, tick - (2 * stages - 1 - stage)) // 2 % microbatches
        action = np.where(forward, int(Action.FORWARD), int(Action.BACKWARD))
        return Table(action, begun, np.zeros_like(action), microbatches, Chunks(stages), flush=False)
