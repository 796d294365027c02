"""How the weights of a model that is served are stored: in which dtype, and how they lie in memory."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from axon.axes import ArraySpec, base
from axon.axes.memory_order import ordered
from axon.errors import UserError
from axon.nn.quantized import quantized
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
    """Parameters, nested by path, of the runtime's module or of the model: what it has in 8 bits is quantised. Raises
    as `stored`."""
    if not runtime.matrices:
        return parameters
    return nested({path: stored(runtime, path, value) for path, value in flattened(parameters).items()})


def stored(runtime: Runtime, path: str, value: Any) -> Any:
    """A parameter of the model as the runtime has it: of a matrix in 8 bits two arrays, by name.

    Each device quantises its own shard; where that is a part of what is summed over, they agree on the scales. Raises
    `UserError` for a matrix of another shape.
    """
    if path not in runtime.matrices:
        return value
    spec, placement = runtime.matrices[path], runtime.placement
    if tuple(value.shape) != spec.shape:
        raise UserError(f"{path} has the shape {tuple(value.shape)}, and must have {spec.shape} here")
    own = {name: runtime.parameters[f"{path}/{name}"] for name in ("values", "scales")}
    places = {name: placement.sharding(part.axes, part.kind) for name, part in own.items()}
    with runtime.tracing():
        run = jax.jit(partial(quantized, spec=spec, dtype=runtime.weights), out_shardings=places)
        return run(jax.device_put(value, placement.sharding(spec.axes, spec.kind)))


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
