"""Layers as they are stored: on every device, or on the stages of a pipeline, which all have the same number."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes.specs import entries
from axon.layout import Placement
from axon.nn.param import Param, Variable


def pad_layers(module: nnx.Module, placement: Placement) -> dict[int, int]:
    """Give the stacked parameters and variables of `module` room for identity layers, as `Layout.pad_layers` asks.

    These come after the others, so that all stages store the same number. Returns: how many layers of a kind there
    are → how many are stored, where these differ.
    """
    padded = {}
    for _, variable in nnx.to_flat_state(nnx.state(module, (Param, Variable))):
        layers = len(variable.layers)
        stored = placement.stored_layers(layers)
        if variable.stack and stored != layers:
            spec = variable.get_value()
            variable.set_value(jax.ShapeDtypeStruct((stored, *spec.shape[1:]), spec.dtype))
            padded[layers] = stored
    return padded


def on_stages() -> bool:
    """Whether the layout in force splits `layers` here: not within a stage, which runs its own."""
    scope = axes.current()
    return scope is not None and bool(scope.placement.mesh_axes("layers", "params"))


def stored_layer(layers: Any, index: Array | int) -> Any:
    """Of arrays with an axis `layers` in front one layer, on every device: the stage that has it sends it to all."""
    return jax.tree.map(lambda x: _layer(x, jnp.asarray(index)), layers)


def _layer(x: Array, index: Array) -> Array:
    stages = entries(jax.typeof(x).sharding.spec[0])
    if not stages:
        return lax.dynamic_index_in_dim(x, index, keepdims=False)

    def local(x: Array, index: Array) -> Array:
        stage, place = index // x.shape[0], index % x.shape[0]
        one = lax.dynamic_index_in_dim(x, place, keepdims=False)
        return lax.psum(jnp.where(lax.axis_index(stages) == stage, one, jnp.zeros_like(one)), stages)

    specs = PartitionSpec(stages), PartitionSpec()
    return jax.shard_map(local, in_specs=specs, out_specs=PartitionSpec(), axis_names=set(stages), check_vma=False)(
        x, index
    )
