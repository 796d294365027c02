"""The state of a training run: all that a step changes."""

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes.

    Args:
        step: how many steps were done. parameters: nested by path. optimizer: what the update keeps, by name.
        variables: the module's own, nested by path, updated without a gradient. in_flight: of a pipeline without a
            flush, the batch that the last step began (`axon.train.delayed.InFlight`); nothing otherwise.

    Leaves are arrays, or their `ArraySpec` or `jax.ShapeDtypeStruct`.
    """

    step: Any
    parameters: dict[str, Any]
    optimizer: Any
    variables: dict[str, Any] = field(default_factory=dict)
    in_flight: Any = field(default_factory=dict)
