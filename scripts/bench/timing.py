"""Timing several steps in turn, on a machine that others use too."""

import math
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np

Seconds = dict[str, np.ndarray]


def alternate(steps: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> Seconds:
    """Seconds of each step in each round, the steps in turn; each step blocks until its work is done.

    The order is reversed from one round to the next, so that none always follows the same neighbour. The
    first `warmup` rounds are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(warmup + rounds):
        for name in names if number % 2 else reversed(names):
            begun = time.perf_counter()
            steps[name]()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - begun)
    return {name: np.array(values) for name, values in seconds.items()}


def median_error(values: np.ndarray) -> float:
    """Standard error of the median of `values`, robustly: 1.2533 · 1.4826 · MAD / √n.

    1.4826 · MAD estimates the standard deviation of a Gaussian with outliers; the median of n draws has 1.2533 (√(π/2))
    times the standard error of their mean.
    """
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / math.sqrt(len(values))


def progress(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
