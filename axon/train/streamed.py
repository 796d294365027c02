"""An optimizer's update one layer at a time, what it updates in the host's memory before and after.

A layer's state is on the device while that layer is updated, and no longer: to fetch all of it at once would need the
device memory that storing it on the host was to save.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec
from axon.axes.memory import HOST, is_on_host, to_device, to_host
from axon.errors import UserError
from axon.layout import Placement
from axon.nn import ParamSpec
from axon.train.optimizers import Optimizer, Parameters, is_by_layer, owner, state_specs

Leaves = dict[str, Any]
"""Place in the state's tree → leaf."""


def check_streams(optimizer: object, placement: Placement) -> None:
    """Raise `UserError` for an optimizer, or a layout, with which layers cannot be streamed from the host."""
    refused = f"Layout.host = {placement.layout.host}"
    if not is_by_layer(optimizer):
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise UserError(
            f"{refused} updates one layer at a time, and {name} does not say that it updates each layer by itself "
            "(by_layer = True). Set Layout.host to (), or use another optimizer, as AdamW"
        )
    stages, others = (placement.mesh_axes("layers", kind) for kind in ("params", "optimizer"))
    if stages != others:
        raise UserError(
            f"{refused} needs 'layers' split in the same way for params and optimizer, and it is split over "
            f"{stages or 'nothing'} and {others or 'nothing'}: take 'layers' out of Layout.optimizer"
        )
    if stages and "params" in placement.layout.host:
        raise UserError(
            f"{refused}: a pipeline's stages cannot fetch parameters from the host yet. Set it to ('optimizer',), or "
            f"take {' and '.join(stages)} out of Layout.mesh"
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
        found, tree = _leaves(state), jax.tree.structure(state)
        owners = {_text(key): owner(key, self.parameters) for key, _ in jax.tree_util.tree_leaves_with_path(state)}
        shared = {key: leaf for key, leaf in found.items() if owners[key] is None}
        moved, new, after = dict(values), {}, {}
        for is_stack, paths in self._parts():
            update: Callable[..., tuple[Any, Leaves, Leaves]] = self._in_turn if is_stack else self._at_once
            own = {key: leaf for key, leaf in found.items() if owners[key] in paths}
            part = ({path: of[path] for path in paths} for of in (gradients, values))
            moved_part, new_part, after = update(*part, own, shared)
            moved |= moved_part
            new |= new_part
        return moved, tree.unflatten((new | after)[key] for key in found)

    def _parts(self) -> list[tuple[bool, list[str]]]:
        """The parameters that are updated together: those with as many layers, and each of the others alone."""
        stacks: dict[int, list[str]] = {}
        for path, spec in self.parameters.items():
            if spec.stack:
                stacks.setdefault(spec.shape[0], []).append(path)
        alone = [(False, [path]) for path, spec in self.parameters.items() if not spec.stack]
        return [*((True, paths) for paths in stacks.values()), *alone]

    def _in_turn(self, gradients: Any, values: Any, own: Leaves, shared: Leaves) -> tuple[Any, Leaves, Leaves]:
        """Layer after layer, by each stage those that it has."""
        stages = self.placement.mesh_axes("layers", "optimizer")
        if not stages:
            return self._scanned(gradients, values, own, shared)
        layers, all_stages = PartitionSpec(stages), PartitionSpec()
        return jax.shard_map(
            self._scanned,
            in_specs=(layers, layers, layers, all_stages),
            out_specs=(layers, layers, all_stages),
            axis_names=set(stages),
            check_vma=False,
        )(gradients, values, own, shared)

    def _scanned(self, gradients: Any, values: Any, own: Leaves, shared: Leaves) -> tuple[Any, Leaves, Leaves]:
        """Layer after layer, each put back where it came from: nothing is stored twice."""

        def layer(carry: Any, index: Array) -> tuple[Any, Leaves]:
            def one(x: Array) -> Array:
                return lax.dynamic_index_in_dim(x, index, keepdims=False)

            values, own = jax.tree.map(one, carry)
            *new, after = self._at_once(jax.tree.map(one, gradients), values, own, shared)
            put = lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda x, y: put(x, y, index, 0), carry, tuple(new)), after

        count = len(next(iter(values.values())))
        (moved, own), afters = lax.scan(layer, (values, own), jnp.arange(count))
        return moved, own, jax.tree.map(lambda x: x[-1], afters)

    def _at_once(self, gradients: Any, stored: Any, own: Leaves, shared: Leaves) -> tuple[Any, Leaves, Leaves]:
        """One layer, or one parameter: its new value and state, where they were, and the state that all share."""
        values = {path: self._moved(x, self._layer[path], "optimizer") for path, x in to_device(stored).items()}
        structure = jax.eval_shape(self._transform.init, values)
        found = to_device(own) | shared
        state = jax.tree_util.tree_map_with_path(lambda key, _: found[_text(key)], structure)
        updates: Any
        updates, state = self._transform.update(gradients, state, values)
        updated = {path: (values[path] + step).astype(values[path].dtype) for path, step in updates.items()}
        back = {path: self._moved(x, self._layer[path], "params") for path, x in (values | updated).items()}
        leaves = _leaves(state)
        new = {key: self._moved(leaves[key], self._specs[key], "optimizer") for key in own}
        return _stored_like(stored, back), _stored_like(own, new), {key: leaves[key] for key in shared}

    def _moved(self, x: Array, spec: ArraySpec, kind: str) -> Array:
        return axes.reshard(x, self.placement.spec(spec.axes, kind))

    @cached_property
    def _layer(self) -> dict[str, ParamSpec]:
        """The parameters, one layer of those that are stacked."""
        return {path: _unstacked(spec) for path, spec in self.parameters.items()}

    @cached_property
    def _transform(self) -> optax.GradientTransformation:
        return self.optimizer.transform(self._layer)

    @cached_property
    def _specs(self) -> Leaves:
        return _leaves(state_specs(self.optimizer, self._layer))


def _unstacked(spec: ParamSpec) -> ParamSpec:
    return replace(spec, axes=spec.own, shape=spec.shape[spec.stack :], stack=0)


def _stored_like(before: Any, after: Any) -> Any:
    """`after` in the memories that `before` is in."""
    return jax.tree.map(lambda x, y: to_host(y) if is_on_host(x) else y, before, after)


def _leaves(tree: Any) -> Leaves:
    return {_text(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}


_text = jax.tree_util.keystr
