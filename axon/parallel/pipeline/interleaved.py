"""Interleaved 1F1B: several chunks of the model on each stage, for a bubble that is as many times smaller."""

from dataclasses import dataclass

import numpy as np

from axon.checks import check_range
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.one_f_one_b import one_f_one_b
from axon.parallel.pipeline.order import from_orders
from axon.parallel.pipeline.table import Action, Table, Work


@dataclass(frozen=True)
class Interleaved:
    """1F1B in which stage s has the chunks s, s + p, s + 2p, … of the model (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).

    Bubble `(p − 1)/(v·m)` for v chunks a stage and m ≥ p. Stage s keeps up to `(v + 1)·p − 2s − 1` pairs of microbatch
    and chunk, each a v-th of the stage's layers, if m is a multiple of p. v times as many sends as 1F1B.

    Microbatches go through a stage's chunks in groups of p; where m is no multiple, in as many groups that are larger,
    so that stages keep up to `(v − 1)·(g − p)` more in groups of g. With fewer microbatches than stages there is one
    group, and every stage idles between chunks: bubble `(v·p − 1)/(v·m) − (v − 1)/v`.

    Attributes:
        virtual: chunks on each stage; 1 is 1F1B.
        split: whether a backward is in two, for inputs and for weights. In lockstep nobody waits for the second then:
            bubble `(p − 1)·(F + I)/(v·m·(F + I + W))`, for what lies between the two.
    """

    virtual: int = 2
    split: bool = False

    def __post_init__(self):
        check_range(self, "[1, inf)", "virtual")
        check_range(self, "[1, 1024]", "virtual")

    def table(self, stages: int, microbatches: int) -> Table:
        orders = [self._order(stage, stages, microbatches) for stage in range(stages)]
        return from_orders(orders, microbatches, Chunks(stages, self.virtual))

    def _order(self, stage: int, stages: int, microbatches: int) -> list[Work]:
        groups = [part.tolist() for part in np.array_split(range(microbatches), max(1, microbatches // stages))]
        down, up = range(self.virtual), range(self.virtual - 1, -1, -1)
        forwards = [Work(Action.FORWARD, i, chunk) for group in groups for chunk in down for i in group]
        backwards = [Work(Action.BACKWARD, i, chunk) for group in groups for chunk in up for i in group]
        ahead = (self.virtual - 1) * len(groups[0]) + 2 * (stages - 1 - stage) + 1
        if self.virtual == 1:
            ahead = stages - stage
        order = one_f_one_b(forwards, backwards, ahead)
        return [part for work in order for part in self._parts(work)]

    def _parts(self, work: Work) -> list[Work]:
        if work.action != Action.BACKWARD or not self.split:
            return [work]
        return [work._replace(action=action) for action in (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)]
