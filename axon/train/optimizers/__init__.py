"""Optimizers and learning rates, as data."""

from axon.train.optimizers.adamw import AdamW
from axon.train.optimizers.base import Averaging, Group, Optimizer, Parameters, descend, state_specs
from axon.train.optimizers.onebit_adam import OneBitAdam
from axon.train.optimizers.schedule import WSD, AnySchedule, Constant, Cosine, Linear, Schedule

__all__ = [
    "WSD",
    "AdamW",
    "AnySchedule",
    "Averaging",
    "Constant",
    "Cosine",
    "Group",
    "Linear",
    "OneBitAdam",
    "Optimizer",
    "Parameters",
    "Schedule",
    "descend",
    "state_specs",
]
