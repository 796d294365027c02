"""The schedules that a config can name."""

from axon.parallel.pipeline.dual_pipe import DualPipeV
from axon.parallel.pipeline.interleaved import Interleaved
from axon.parallel.pipeline.one_f_one_b import GPipe, OneFOneB, TwoBW
from axon.parallel.pipeline.text import FromFile
from axon.parallel.pipeline.zero_bubble import ZeroBubbleH1, ZeroBubbleV

__all__ = ["DualPipeV", "FromFile", "GPipe", "Interleaved", "OneFOneB", "TwoBW", "ZeroBubbleH1", "ZeroBubbleV"]
