"""How the weights of a model that is served are stored: in which dtype, and how they lie in memory."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axon.axes import ArraySpec, base
from axon.axes.memory_order import ordered
from axon.nn.multi_lora import MultiAdaptedWeight, MultiLoRA
from axon.runtime import Runtime, flattened, nested

HEADS = ("heads", "kv_heads")


def placed(runtime: Runtime, parameters: Mapping[str, Any]) -> Any:
    """Parameters as of `as_stored`, as the runtime's steps read them; those that lie so are not copied.

    A TPU's matrix unit takes tiles of what is summed over by a product's columns. Of `embed heads head_dim` these are
    `heads head_dim`, unless heads come before embed: each step would have to copy those weights.
    """
    parameters = as_stored(runtime, parameters)
    places = {path: _place(runtime, spec) for path, spec in runtime.parameters.items()}
    return jax.device_put(parameters, nested(places)) if runtime.placement.platform == "tpu" else parameters


def as_stored(runtime: Runtime, parameters: Mapping[str, Any]) -> Any:
    """Parameters, nested by path, of the runtime's module or of the model: what transforms make operands of is made
    them, and adapters' factors that are not among them are 0. Raises as `Runtime.derived`."""
    if not runtime.operands:
        return parameters
    found = nested({path: runtime.derived(path, value) for path, value in flattened(parameters).items()})
    absent = {path: runtime.parameters[path] for path in factors_of(runtime) if path not in flattened(found)}
    zeros = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in runtime.abstract(absent).items()}
    return nested(flattened(found) | zeros)


def factors_of(runtime: Runtime) -> list[str]:
    """The paths of what holds the factors of all adapters, PATH/a and PATH/b of each weight that they may adapt."""
    adapted = [path for path, one in runtime.operands.items() if isinstance(one, MultiAdaptedWeight)]
    return [f"{path}/{factor}" for path in adapted for factor in ("a", "b")]


def adapter_rank(runtime: Runtime) -> int:
    """Of the adapters that it has room for, all together."""
    return next((one.rank for one in runtime.transforms if isinstance(one, MultiLoRA)), 0)


def abstract(runtime: Runtime) -> Any:
    """What `placed` gives, of no arrays: nested by path `jax.ShapeDtypeStruct`s."""

    def leaf(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=_place(runtime, spec))

    return nested({path: leaf(spec) for path, spec in runtime.parameters.items()})


def _place(runtime: Runtime, spec: ArraySpec) -> Any:
    sharding = runtime.placement.sharding(spec.axes, spec.kind)
    order = _order(tuple(map(base, spec.axes))) if runtime.placement.platform == "tpu" else None
    return sharding if order is None else ordered(sharding, order)


def _order(axes: tuple[str, ...]) -> tuple[int, ...] | None:
    """Heads before what is summed over, where a product gives whole heads; None: as the axes are."""
    layers = axes[:1] == ("layers",)
    if len(axes) - layers != 3 or axes[-2] not in HEADS or axes[-1] != "head_dim":
        return None
    summed = len(axes) - 3
    return (*range(summed), summed + 1, summed, summed + 2)
