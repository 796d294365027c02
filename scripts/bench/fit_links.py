"""Latency and bandwidth of links from the seconds of collectives, as `axon plan --links` takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from axon.chips.target import Target
from axon.plan.predict.links import Bandwidths, Links

COLLECTIVES: Mapping[str, Callable[[Links, str, float], float]] = {
    "all-gather": lambda links, axis, size: links.gather((axis,), size),
    "reduce-scatter": lambda links, axis, size: links.gather((axis,), size),
    "all-reduce": lambda links, axis, size: links.reduce((axis,), size),
    "all-to-all": lambda links, axis, size: links.exchange((axis,), size),
    "ring permute": Links.send,
}
"""What `axon.plan.predict.links` says of each: seconds along a mesh axis for an array of so many bytes."""

RATES, TIMES = ("link", "network"), ("latency", "network_latency")
_FREE = dict.fromkeys(RATES, np.inf) | dict.fromkeys(TIMES, 0.0)


@dataclass(frozen=True)
class Scope:
    """Groups of devices among which a collective runs: along `axis` of a mesh, the slowest link first.

    `name` is "within" a host or slice, "across" them, or the "whole" machine where there are several.
    """

    name: str
    mesh: Mapping[str, int]
    axis: str

    @property
    def devices(self) -> int:
        return self.mesh[self.axis]


@dataclass(frozen=True)
class Timing:
    """A collective of an array of `size` bytes on each device (gathered, or before it is scattered), as measured."""

    scope: Scope
    collective: str
    size: int
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a ring of n: of S, (n − 1)/n S; twice that in an all-reduce, S to a
        neighbour (Thakur et al. 2005)."""
        n = self.scope.devices
        times = {"all-reduce": 2 * (n - 1) / n, "ring permute": 1.0}
        return times.get(self.collective, (n - 1) / n) * self.size

    @property
    def algorithm_bandwidth(self) -> float:
        """Size ÷ seconds, as nccl-tests define it (NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes sent by the ring's formula ÷ seconds: algorithm bandwidth × (n − 1)/n, as nccl-tests define it."""
        return self.sent / self.seconds

    def predicted(self, target: Target, bandwidths: Bandwidths) -> float:
        """Seconds by `axon.plan.predict.links`."""
        return COLLECTIVES[self.collective](Links(target, self.scope.mesh, bandwidths), self.scope.axis, self.size)


def fit(timings: Sequence[Timing], target: Target) -> dict[str, float]:
    """Fields of `Bandwidths` by which its formulas come closest to `timings`: latency and bandwidth within a host or
    slice, and across them where there are such.

    Least squares of relative errors, neither below zero; a bandwidth that the times do not show is left out.
    """
    links: dict[str, float] = {}
    for scope, rate, latency in (("within", "link", "latency"), ("across", "network", "network_latency")):
        chosen = [one for one in timings if one.scope.name == scope]
        if chosen:
            links |= _fit(chosen, target, rate, latency)
    return links


def _fit(timings: Sequence[Timing], target: Target, rate: str, latency: str) -> dict[str, float]:
    """Seconds are linear in 1 ÷ bandwidth and in latency: the factors are the predictions with one of them alone."""
    alone = Bandwidths(host=1.0, **{**_FREE, rate: 1.0}), Bandwidths(host=1.0, **{**_FREE, latency: 1.0})
    factors = np.array([[one.predicted(target, each) / one.seconds for each in alone] for one in timings])
    scale = factors.max(axis=0, initial=0)
    scale[scale == 0] = 1
    solution, _ = nnls(factors / scale, np.ones(len(timings)))
    inverse, seconds = solution / scale
    return ({rate: float(1 / inverse)} if inverse > 0 else {}) | {latency: float(seconds)}
