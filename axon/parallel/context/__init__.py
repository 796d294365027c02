"""Context parallelism: attention over sequences whose positions are split over devices."""

from axon.parallel.context.choice import (
    AttentionKind,
    Split,
    choose_context,
    exchange_problem,
    exchanged_elements,
    gathered_elements,
    ring_elements,
    ring_problem,
)
from axon.parallel.context.gathered import gathered_attention
from axon.parallel.context.positions import Positions, permuted
from axon.parallel.context.ring import ring_attention
from axon.parallel.context.route import Route, route
from axon.parallel.context.runs import Runs
