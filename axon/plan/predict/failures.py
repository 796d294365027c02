"""Failures of devices: the best interval between checkpoints, and the share of the time that trains."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """How often a device fails, and what a failure and a checkpoint cost, in seconds.

    Failures are independent and any of them stops the whole machine, so that one of N devices fails N times as often.

    Args:
        mtbf: mean time between failures of one device; by default 50,000 hours, as 419 failures in 54 days of 16,384
            H100s (arXiv:2407.21783, 3.3.4). restart: from a failure until the run trains again, without what has to be
            trained again. save: for which a checkpoint stops training. Either's default is an assumption.
    """

    mtbf: float = 50_000 * 3600.0
    restart: float = 600.0
    save: float = 30.0

    def between(self, devices: int) -> float:
        """Mean seconds between failures of a machine."""
        return self.mtbf / devices

    def interval(self, devices: int) -> float:
        """The best seconds of training between checkpoints (Daly 2006, eq. 37; its first term is Young 1974):
        √(2 save M) (1 + √x / 3 + x / 9) − save with x = save / 2M; M where a checkpoint takes longer than 2M."""
        between = self.between(devices)
        x = self.save / (2 * between)
        if x >= 1:
            return between
        return math.sqrt(2 * self.save * between) * (1 + math.sqrt(x) / 3 + x / 9) - self.save

    def goodput(self, devices: int, interval: float | None = None) -> float:
        """The expected share of the time that trains what is kept (Daly 2006, eq. 20): of checkpoints after `interval`
        seconds of training, the best by default, interval ÷ (M exp(restart / M) (exp((interval + save) / M) − 1))."""
        between = self.between(devices)
        interval = self.interval(devices) if interval is None else interval
        lost = (self.restart + interval + self.save) / between
        if lost > 500:
            return 0.0
        return interval / (between * math.exp(self.restart / between) * math.expm1((interval + self.save) / between))
