"""An optimizer's update one layer at a time, what it updates in the host's memory before and after.

A layer's state is on the device while that layer is updated, and no longer: to fetch all of it at once would need the
device memory that storing it on the host was to save.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.memory import HOST
from axon.errors import UserError
from axon.layout import Placement
from axon.train.layer_update import LayerUpdate, Leaves, at, put, rebuilt
from axon.train.optimizers import Optimizer, Parameters


def check_streams(placement: Placement) -> None:
    """Raise `UserError` for a layout with which layers cannot be streamed from the host."""
    refused = f"Execution.host = {placement.host}"
    stages, others = (placement.mesh_axes("layers", kind) for kind in ("params", "optimizer"))
    if stages != others:
        raise UserError(
            f"{refused} needs 'layers' split in the same way for params and optimizer, and it is split over "
            f"{stages or 'nothing'} and {others or 'nothing'}: take 'layers' out of Layout.optimizer"
        )
    if not placement.has_host_memory:
        raise UserError(f"{refused}: devices of this platform ({placement.platform}) have no memory {HOST!r}")
    if placement.devices and not placement.memories:
        # JAX would leave the arrays on the device, and say nothing.
        raise UserError(
            f"{refused}: the devices of a {placement.platform} that is only described do not name their memories, so "
            "JAX cannot compile for arrays in one of them. Compile for a TPU, or run on the machine itself"
        )


@dataclass(frozen=True)
class Streamed:
    """`optimizer`'s update of these parameters, where its state, the parameters, or both are in the host's memory.

    Parameters stacked along `layers` are updated in a loop over layers, all others each by itself.
    """

    optimizer: Optimizer
    parameters: Parameters
    placement: Placement

    def __call__(self, gradients: Mapping[str, Array], state: Any, values: Mapping[str, Array]) -> tuple[Any, Any]:
        """The parameters after the update, path → array, under the `params` rows as before, and the new state.

        `gradients` are under the `optimizer` rows, as the state is.
        """
        layers = LayerUpdate(self.optimizer, self.parameters, self.placement)
        owned, shared = layers.divided(state)
        moved, new, after = dict(values), {}, {}
        for part, own in zip(layers.parts, owned, strict=True):
            update: Callable[..., tuple[Any, Leaves, Leaves]]
            update = layers.update if part.layers is None else self._layer_by_layer(layers)
            given = ({path: of[path] for path in part.paths} for of in (gradients, values))
            moved_part, new_part, after = update(*given, own, shared)
            moved |= moved_part
            new |= new_part
        return moved, rebuilt(state, new | after)

    def _layer_by_layer(self, layers: LayerUpdate) -> Callable[..., tuple[Any, Leaves, Leaves]]:
        """The update layer after layer, by each stage those that it has."""
        stages = self.placement.mesh_axes("layers", "optimizer")

        def scanned(gradients: Any, values: Any, own: Leaves, shared: Leaves) -> tuple[Any, Leaves, Leaves]:
            return _scanned(layers, gradients, values, own, shared)

        if not stages:
            return scanned
        split, all_stages = PartitionSpec(stages), PartitionSpec()
        return jax.shard_map(
            scanned,
            in_specs=(split, split, split, all_stages),
            out_specs=(split, split, all_stages),
            axis_names=set(stages),
            check_vma=False,
        )


def _scanned(
    layers: LayerUpdate, gradients: Any, values: Any, own: Leaves, shared: Leaves
) -> tuple[Any, Leaves, Leaves]:
    """Layer after layer, each put back where it came from: nothing is stored twice."""

    def layer(carry: Any, index: Array) -> tuple[Any, Leaves]:
        values, own = carry
        values, new, after = layers.update_at(index, gradients, values, at(index, own), shared)
        return (values, put(index, own, new)), after

    count = len(next(iter(values.values())))
    (moved, own), afters = lax.scan(layer, (values, own), jnp.arange(count))
    return moved, own, jax.tree.map(lambda x: x[-1], afters)
