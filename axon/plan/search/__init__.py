"""The search for a plan: a `Layout` and an `Execution` for a model, a batch and a machine.

`space` has the layouts that are tried, `plans` ranks them, `reasons` says in a sentence why a plan lost, `refusals` why
there is none. See docs/planner.md.
"""

from axon.plan.search.plans import Plan, Planner
from axon.plan.search.space import Pins

__all__ = ["Pins", "Plan", "Planner"]
