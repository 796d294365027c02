"""Layers as they are stored: on every device, or on the stages of a pipeline, which all have the same number."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.traversals import flatten_mapping as flattened
from flax.nnx.traversals import unflatten_mapping as nested
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


class LayerValues:
    """The values of a block's parameters and variables, of all its layers: those that are cut into layers, nested by
    path, and those that a layer reads in their stack (`Param.in_stack`), if `reads` says that it may."""

    def __init__(self, block: nnx.Module, reads: bool):
        found = dict(nnx.to_flat_state(nnx.state(block)))
        params = nnx.to_flat_state(nnx.state(block, Param)) if reads else ()
        in_stack = {path for path, param in params if param.in_stack}
        self.cut = nested({path: found[path].get_value() for path in found if path not in in_stack})
        self._stacks = {path: found[path].get_value() for path in in_stack}

    def of_layer(self, cut: Any, place: Any) -> Any:
        """All of the layer in this place, of which `cut` are those that are cut."""
        own = {path: axes.LayerWeight(stack, place) for path, stack in self._stacks.items()}
        return nested(flattened(cut) | own)


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
