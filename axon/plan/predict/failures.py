"""Failures of devices: the best interval between checkpoints, and the share of the time that trains."""

import math
from dataclasses import dataclass, replace

LEAST_SAVE = 1.0
"""Seconds for which a checkpoint stops training at least: an assumption."""


@dataclass(frozen=True)
class Failures:
    """How often a device fails, and what a failure and a checkpoint cost, in seconds.

    Failures are independent and any of them stops the whole machine, so that one of N devices fails N times as often.

    Args:
        mtbf: mean time between failures of one device; by default 50,000 hours, as 419 failures in 54 days of 16,384
            H100s (arXiv:2407.21783, 3.3.4). restart: from a failure until the run trains again, without what has to be
            trained again, by default an assumption. save: for which a checkpoint stops training; None: as long as a
            device's state takes to its host, or `LEAST_SAVE`.
    """

    mtbf: float = 50_000 * 3600.0
    restart: float = 600.0
    save: float | None = None

    def of_state(self, seconds: float) -> "Failures":
        """With `save` for a state that takes so long to the host, unless it is set."""
        return replace(self, save=max(LEAST_SAVE, seconds)) if self.save is None else self

    @property
    def stall(self) -> float:
        return LEAST_SAVE if self.save is None else self.save

    def between(self, devices: int) -> float:
        """Mean seconds between failures of a machine."""
        return self.mtbf / devices

    def interval(self, devices: int) -> float:
        """The best seconds of training between checkpoints (Daly 2006, eq. 37; its first term is Young 1974):
        √(2 save M) (1 + √x / 3 + x / 9) − save with x = save / 2M; M where a checkpoint takes longer than 2M."""
        between, save = self.between(devices), self.stall
        x = save / (2 * between)
        if x >= 1:
            return between
        return math.sqrt(2 * save * between) * (1 + math.sqrt(x) / 3 + x / 9) - save

    def goodput(self, devices: int, interval: float | None = None) -> float:
        """The expected share of the time that trains what is kept (Daly 2006, eq. 20): of checkpoints after `interval`
        seconds of training, the best by default, interval ÷ (M exp(restart / M) (exp((interval + save) / M) − 1))."""
        between = self.between(devices)
        interval = self.interval(devices) if interval is None else interval
        lost = (self.restart + interval + self.stall) / between
        if lost > 500:
            return 0.0
        return interval / (between * math.exp(self.restart / between) * math.expm1((interval + self.stall) / between))
