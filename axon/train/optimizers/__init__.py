"""Optimizers and learning rates, as data."""

from axon.train.optimizers.adafactor import Adafactor
from axon.train.optimizers.adamw import AdamW
from axon.train.optimizers.base import (
    Averaging,
    ByLayer,
    Freezing,
    Multiplying,
    Optimizer,
    Rule,
    frozen_paths,
    is_by_layer,
    optimizer_parts,
    update_flops,
)
from axon.train.optimizers.descend import descend
from axon.train.optimizers.ema import EMA
from axon.train.optimizers.from_optax import Optax
from axon.train.optimizers.groups import Group, Parameters
from axon.train.optimizers.lion import Lion
from axon.train.optimizers.muon import Muon
from axon.train.optimizers.onebit_adam import OneBitAdam
from axon.train.optimizers.schedule import WSD, AnySchedule, Constant, Cosine, Linear, Schedule, schedule_notices
from axon.train.optimizers.schedule_free import ScheduleFreeAdamW
from axon.train.optimizers.sgd import SGD
from axon.train.optimizers.soap import SOAP
from axon.train.optimizers.state import owner, state_specs
