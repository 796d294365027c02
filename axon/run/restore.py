"""Reading the results of a run: the parameters to evaluate, and the variables."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.checkpoint import CheckpointError, Reader
from axon.errors import UserError
from axon.fields import field_values
from axon.nn import parameters
from axon.runtime import Runtime, flattened, nested
from axon.train.optimizers import Averaging
from axon.train.state import State
from axon.train.step import Program
from axon.train.update import Descent

IN_FLIGHT = "in_flight"
"""Name in `extra` of what a program must be to go on with a saved batch in flight."""


def restore_evaluated(reader: Reader, runtime: Runtime, optimizer: Any) -> tuple[Any, Any]:
    """The parameters to evaluate, and the variables, that a run with `optimizer` saved last.

    The optimizer's state is read only if the optimizer averages parameters. Raises `CheckpointError` for parameters
    that are not finite: only finite ones are saved.
    """
    update = Descent(runtime, optimizer) if isinstance(optimizer, Averaging) else None
    stored = runtime.parameters if update is None else parameters(runtime.module)  # those that averages follow from
    wanted = {"parameters": nested(stored), "variables": nested(runtime.variables)}
    if update is not None:
        wanted["optimizer"] = update.specs(stored)
    found = reader.restore_parts(runtime.abstract(wanted), specs=wanted, cast=runtime.weights is not None)
    check_finite(reader, runtime, found["parameters"])
    if update is None:
        return found["parameters"], found["variables"]
    with runtime.tracing():
        values = update.evaluated(State(0, found["parameters"], found["optimizer"], found["variables"]))
    cast = {path: value.astype(runtime.parameters[path].dtype) for path, value in flattened(values).items()}
    return nested(cast), found["variables"]


def restore_state(reader: Reader, program: Program, step: int | None = None) -> tuple[State, dict[str, Any]]:
    """The state that a run saved at `step` (None: last), and the `extra` saved with it.

    A batch in flight is restored if this program can go on with it; otherwise none is (see `lost_in_flight`).
    """
    abstract, specs = program.abstract_state(), program.specs
    extra = reader.extra(step)
    if extra.get(IN_FLIGHT, "") == program.in_flight:
        return reader.restore(abstract, step, specs)
    names = [field.name for field in fields(State) if field.name != "in_flight"]
    parts, of_parts = (field_values(tree, names) for tree in (abstract, specs))
    found = reader.restore_parts(parts, step, of_parts)
    return program.with_nothing_in_flight(State(**found)), extra


def lost_in_flight(extra: Mapping[str, Any], program: Program) -> str | None:
    """What to say of a batch in flight that was saved with `extra` and cannot be gone on with; None: there is none."""
    saved = extra.get(IN_FLIGHT, "")
    if saved == program.in_flight:
        return None
    lost = "the batch in flight is lost: it is of another schedule, dtype, or number of stages, microbatches or tokens"
    begins = "nothing is in flight in this checkpoint, so that the first step changes no parameter"
    return "; ".join([lost] * bool(saved) + [begins] * bool(program.in_flight))


def check_finite(reader: Reader, runtime: Runtime, parameters: Any) -> None:
    """Raise `CheckpointError` for restored parameters, nested by path, that are not finite, with their paths."""
    with runtime.tracing():
        finite = runtime.jit(lambda values: jax.tree.map(lambda v: jnp.all(jnp.isfinite(v)), values))(parameters)
    bad = [path for path, good in flattened(jax.device_get(finite)).items() if not np.asarray(good)]
    if bad:
        raise CheckpointError(
            f"the checkpoint {reader.folder()} has parameters that are not finite: "
            f"{', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}. "
            "Only finite ones are saved: its files are damaged. Delete or move its folder to continue from the last one"
        )


def check_same_mesh(saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Raise `UserError` for a state whose shape depends on the mesh, if it is to be continued on another.

    Args:
        saved, here: the mesh axes that the shape depends on, and their sizes, in the checkpoint and in this run.
    """
    if dict(saved) == dict(here):
        return
    axes = [axis for axis in {**saved, **here} if saved.get(axis, 1) != here.get(axis, 1)]
    sizes = ", ".join(f"{axis!r} {saved.get(axis, 1)} in the checkpoint and {here.get(axis, 1)} here" for axis in axes)
    raise UserError(
        f"the optimizer's state differs between replicas or devices, so it cannot be restored on another mesh: "
        f"Layout.mesh has {sizes}. Set Layout.mesh as it was, or begin a new run with Train.init_from"
    )
