"""What a run that was trained left to others: the parameters to evaluate, and the variables."""

from typing import Any

from axon.checkpoint import Reader
from axon.runtime import Runtime, nested
from axon.train.optimizers import Averaging
from axon.train.state import State
from axon.train.update import Descent


def restore_evaluated(reader: Reader, runtime: Runtime, optimizer: Any) -> tuple[Any, Any]:
    """The parameters to evaluate, and the variables, that a run with `optimizer` saved last.

    Of the optimizer's state only what an average is made of is read, where the optimizer keeps one.
    """
    wanted = {"parameters": nested(runtime.parameters), "variables": nested(runtime.variables)}
    if not isinstance(optimizer, Averaging):
        found = reader.restore_parts(runtime.abstract(wanted))
        return found["parameters"], found["variables"]
    update = Descent(runtime, optimizer)
    wanted["optimizer"] = update.specs(runtime.parameters)
    found = reader.restore_parts(runtime.abstract(wanted))
    with runtime.tracing():
        values = update.evaluated(State(0, found["parameters"], found["optimizer"], found["variables"]))
    return values, found["variables"]
