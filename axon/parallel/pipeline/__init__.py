"""Pipelines as data: schedules that are checked, drawn and executed from one table.

A schedule makes a `Table` for a number of stages and microbatches: what each stage does in each tick. `lockstep` gives
it ticks that are the same action on every stage, `slots` says where values wait and which stage they go to, `phases`
which ticks are loops, and `check` proves all of it. `figures` says what it costs. All are NumPy, without jax.
"""

from axon.parallel.pipeline.check import check
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.dual_pipe import DualPipeV
from axon.parallel.pipeline.figures import Costs, Figures, executed, figures
from axon.parallel.pipeline.interleaved import Interleaved
from axon.parallel.pipeline.lockstep import forwards, lockstep
from axon.parallel.pipeline.one_f_one_b import GPipe, OneFOneB, TwoBW
from axon.parallel.pipeline.periodic import ages, unrolled
from axon.parallel.pipeline.phases import Phase, phases
from axon.parallel.pipeline.slots import NONE, SHIFTS, Slots, slots
from axon.parallel.pipeline.table import Action, Cell, Table, Work
from axon.parallel.pipeline.text import FromFile
from axon.parallel.pipeline.zero_bubble import ZeroBubbleH1, ZeroBubbleV
