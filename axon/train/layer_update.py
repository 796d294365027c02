"""An optimizer's update of one layer at a time, wherever the state of the others is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import optax
from jax import Array, lax

from axon import axes
from axon.axes import ArraySpec
from axon.axes.memory import is_on_host, to_device, to_host
from axon.layout import Placement
from axon.nn import ParamSpec
from axon.runtime.stored import is_stored
from axon.train.optimizers import Averaging, Optimizer, Parameters, owner, state_specs

Leaves = dict[str, Any]
"""Place in the state's tree → leaf."""


class LayerGroup(NamedTuple):
    """Parameters that are updated together, one layer at a time if they are stacked: there are `layers`, else None."""

    layers: int | None
    paths: list[str]


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """`optimizer`'s update of one layer of the parameters that are stacked along `layers`, or of another parameter."""

    optimizer: Optimizer
    parameters: Parameters
    placement: Placement

    @cached_property
    def parts(self) -> list[LayerGroup]:
        """The parameters that are updated together: those with as many layers, and each of the others alone."""
        stacks: dict[int, list[str]] = {}
        for path, spec in self.parameters.items():
            if spec.stack:
                stacks.setdefault(spec.shape[0], []).append(path)
        alone = [LayerGroup(None, [path]) for path, spec in self.parameters.items() if not spec.stack]
        return [*(LayerGroup(layers, paths) for layers, paths in stacks.items()), *alone]

    def divided(self, state: Any) -> tuple[list[Leaves], Leaves]:
        """A state's leaves: those of each part, and those that all parameters share."""
        found = leaves(state)
        owners = {text: owner(key, self.parameters) for text, (key, _) in _keyed(state).items()}
        own = [{key: found[key] for key, of in owners.items() if of in part.paths} for part in self.parts]
        return own, {key: found[key] for key, of in owners.items() if of is None}

    # ---- one layer ------------------------------------------------------------------------------------------------

    def update(self, gradients: Any, stored: Any, own: Leaves, shared: Leaves) -> tuple[Any, Leaves, Leaves]:
        """The new value and state of a layer, in the memories that they were in, and the state that all share."""
        values = self._values(stored)
        state = self._state(values, to_device(own) | shared)
        updates: Any
        updates, state = self._transform.update(gradients, state, values)
        updated = {path: (values[path] + step).astype(values[path].dtype) for path, step in updates.items()}
        after = leaves(state)
        new = {key: self._moved(after[key], self.specs[key], "optimizer") for key in own}
        return self._back(stored, values | updated), _stored_like(own, new), {key: after[key] for key in shared}

    def update_at(
        self, index: Array | None, gradients: Any, stored: Any, own: Leaves, shared: Leaves
    ) -> tuple[Any, Leaves, Leaves]:
        """The same of one layer of stacks, whose state is `own`: what is returned first is stacks. None: `update`."""
        new, own, after = self.update(at(index, gradients), at(index, stored), own, shared)
        return put(index, stored, new), own, after

    def initial(self, stored: Any) -> Leaves:
        """The state of a layer before the first update."""
        found = leaves(self._transform.init(self._values(stored)))
        return {key: self._moved(leaf, self.specs[key], "optimizer") for key, leaf in found.items()}

    def evaluated(self, stored: Any, own: Leaves, shared: Leaves) -> Any:
        """The parameters of a layer that evaluation uses, of an optimizer that averages."""
        assert isinstance(self.optimizer, Averaging)
        values = self._values(stored)
        return self._back(stored, self.optimizer.evaluated(self._state(values, own | shared), values))

    def _values(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        return {path: self._moved(x, self._layer[path], "optimizer") for path, x in to_device(stored).items()}

    def _back(self, stored: Mapping[str, Array], values: Mapping[str, Array]) -> Any:
        return _stored_like(stored, {path: self._moved(x, self._layer[path], "params") for path, x in values.items()})

    def _state(self, values: Mapping[str, Array], found: Leaves) -> Any:
        structure = jax.eval_shape(self._transform.init, values)
        return jax.tree_util.tree_map_with_path(lambda key, _: found[_text(key)], structure)

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
    def specs(self) -> Leaves:
        """The state in axes, one layer of what is stacked."""
        return leaves(state_specs(self.optimizer, self._layer))


def at(index: Array | None, tree: Any) -> Any:
    """One element of arrays along their first dimension; None: the arrays."""
    if index is None:
        return tree
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(index: Array | None, tree: Any, element: Any) -> Any:
    """Arrays with one element along their first dimension replaced; None: `element`."""
    if index is None:
        return element
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), tree, element)


def leaves(tree: Any) -> Leaves:
    """The leaves of a state by place, arrays in files among them."""
    return {text: leaf for text, (_, leaf) in _keyed(tree).items()}


def rebuilt(like: Any, found: Mapping[str, Any]) -> Any:
    """A state like another, of leaves by place."""
    return jax.tree.structure(like, is_leaf=is_stored).unflatten(found[key] for key in leaves(like))


def _keyed(tree: Any) -> dict[str, tuple[Any, Any]]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored)
    return {_text(key): (key, leaf) for key, leaf in found}


def _unstacked(spec: ParamSpec) -> ParamSpec:
    return replace(spec, axes=spec.own, shape=spec.shape[spec.stack :], stack=0)


def _stored_like(before: Any, after: Any) -> Any:
    """`after` in the memories that `before` is in."""
    return jax.tree.map(lambda x, y: to_host(y) if is_on_host(x) else y, before, after)


_text = jax.tree_util.keystr
