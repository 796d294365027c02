"""Whether a stage that has nothing to do in a tick leaves its work out, in a branch of its own.

All devices of a stage take one branch, since the table has one cell for it, and meet the collectives in a branch in the
program's order: so one may be there if those that meet in it are devices of one stage. Along `pipe`, which is manual,
only operations exchange that name it: what the partitioner adds is along the other mesh axes. Left out or not, a step
takes as long, since the stages that work are waited for: so nothing is left out where a branch takes more time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from axon.axes import log_choice, platform, reshard
from axon.axes.patterns import Names
from axon.parallel.pipeline.region import PIPE

IDLE = "idle stages"
"""The topic of the choice whether they leave their work out."""

COPIED = "compiled for TPUs, a branch copies what waits in slots, and a step takes longer (docs/pipelines.md)"
NO_BRANCH = {
    "gpu": "compiled with them in a branch, what stages send is waited for (docs/pipelines.md)",
    "cpu": "devices of this platform begin collectives in an order of their own",
}
"""Why a stage's own collectives are in no branch, by platform."""


def unless_idle(of_phase: np.ndarray, active: Array, name: str, work: Callable[[], Any]) -> Any:
    """What the work of this name gives; zeros, without doing it, where a stage is not `active` and leaves it out.

    Args:
        of_phase: `[tick, stage]`, whether a stage works in the ticks of this phase.
    """
    if np.all(of_phase):
        return work()
    traced, shapes = jax.make_jaxpr(work, return_shape=True)()  # shapes alone do not say in which memory they are
    reason = objection(traced.jaxpr, platform())
    log_choice(IDLE, f"compute a {name} and drop it: {reason}" if reason else f"leave their {name} out")
    run = core.jaxpr_as_fun(traced)
    found = run() if reason else lax.cond(active, run, lambda: list(map(_zeros, traced.out_avals)))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _zeros(of: Any) -> Array:
    """Zeros of a type, split and in a memory as it says."""
    return jax.device_put(reshard(jnp.zeros(of.shape, of.dtype), of.sharding.spec), of.memory_space)


def objection(jaxpr: core.Jaxpr, platform: str) -> str | None:
    """Why a stage's work, as it is traced, is in no branch of its own; None: it is."""
    for name, axes in exchanges(jaxpr):
        if PIPE in axes:
            return f"a branch by stage would have {name} over {', '.join(map(repr, axes))}, in which all stages meet"
    if platform == "tpu":
        return COPIED
    mesh = jax.sharding.get_abstract_mesh()
    own = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes]
    return f"its collectives are over {', '.join(map(repr, own))}; {NO_BRANCH[platform]}" if own else None


def exchanges(jaxpr: core.Jaxpr) -> Iterator[tuple[str, Names]]:
    """The operations by which devices exchange along mesh axes that they name, those in bodies too, each with these."""
    for one in jaxpr.eqns:
        if one.primitive.name != "axis_index" and (axes := _named_axes(one)):
            yield one.primitive.name, axes
        for body in core.jaxprs_in_params(one.params):
            yield from exchanges(body)


def _named_axes(one: core.JaxprEqn) -> Names:
    """The mesh axes that an operation names: in JAX's collectives they are called so."""
    named: Any = one.params.get("axis_name", one.params.get("axes", ()))
    named = (named,) if isinstance(named, str) else named
    return tuple(axis for axis in named if isinstance(axis, str)) if isinstance(named, tuple) else ()
