"""Context parallelism: attention over sequences whose positions are split over devices."""

from axon.parallel.context.gathered import gathered_attention
from axon.parallel.context.ring import ring_attention
from axon.parallel.context.route import Route, route

__all__ = ["Route", "gathered_attention", "ring_attention", "route"]
