"""An optimizer's update one layer at a time, its state in files: ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857).

A step is one compiled program that makes the gradients, and a loop over layers outside of it: while a layer is updated,
the state of the next is read, and that of the one before is written.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.axes import ArraySpec
from axon.errors import UserError
from axon.layout import Placement
from axon.runtime import flattened, nested
from axon.runtime.scratch import Scratch
from axon.runtime.stored import Files, StoredArray
from axon.train.layer_update import LayerUpdate, Leaves, at, leaves, put, rebuilt
from axon.train.optimizers import Averaging
from axon.train.state import State
from axon.train.update import Descent
from axon.train.update_shards import UpdateShard, pieces, read_ahead

KIND = "optimizer"


class DeferredUpdate(NamedTuple):
    """In the place of the optimizer's state, between a step's compiled program and its update: both need no more."""

    gradients: dict[str, Array]
    optimizer: Any


def check_on_disk(placement: Placement) -> None:
    """Raise `UserError` for a mesh whose devices' state cannot be in files."""
    if len({device.process_index for device in placement.devices}) > 1:
        raise UserError(
            f"Execution.disk = {dict(placement.disk)}: the mesh's devices are of several processes, whose state cannot "
            "be in files yet. Set Execution.disk to {}, or train with one process"
        )


@dataclass(frozen=True)
class DiskDescent(Descent):
    """`Descent` whose optimizer's state is in files, all but scalars.

    Compiled are `init` and `step` without the files: `begin` and `finish` do what is left to do outside.
    """

    def __post_init__(self):
        super().__post_init__()
        check_on_disk(self.runtime.placement)

    # ---- compiled -------------------------------------------------------------------------------------------------

    def init(self, values: Any) -> Any:
        return self.stored(super().init(values))

    def applied(self, state: State, gradients: Any) -> State:
        pending = DeferredUpdate(flattened(self.runtime.reshard(gradients, KIND)), state.optimizer)
        return State(state.step + 1, state.parameters, pending, state.variables)

    # ---- outside --------------------------------------------------------------------------------------------------

    def begin(self, state: State) -> State:
        values = flattened(state.parameters)
        for piece in pieces(self._layers, state.optimizer):
            if piece.in_files:
                piece.write(self._initial(piece.index, piece.of(values)))
                piece.wait()
        return state

    def finish(self, state: State) -> State:
        """The state after a compiled `step`, of which the whole update is left to do: its arrays are donated."""
        gradients, before = state.optimizer
        values, after = flattened(state.parameters), leaves(before)
        shared = self._layers.divided(before)[1]
        new: Leaves = {}
        writing: deque[UpdateShard] = deque()
        for piece, own in read_ahead(pieces(self._layers, before)):
            moved, found, new = self._update(piece.index, piece.of(gradients), piece.of(values), own, shared)
            values |= moved
            after |= piece.write(found)
            writing.append(piece)
            if len(writing) > 1:
                writing.popleft().wait()
        for piece in writing:
            piece.wait()
        after |= new
        return State(state.step, nested(values), rebuilt(before, after), state.variables)

    def evaluated(self, state: State) -> Any:
        if not isinstance(self.optimizer, Averaging):
            return state.parameters
        values = flattened(jax.tree.map(jnp.copy, state.parameters))
        shared = self._layers.divided(state.optimizer)[1]
        for piece, own in read_ahead(pieces(self._layers, state.optimizer)):
            values |= self._averaged(piece.index, piece.of(values), own, shared)
        return nested(values)

    # ---- files ----------------------------------------------------------------------------------------------------

    @cached_property
    def files(self) -> Files:
        specs = jax.tree.leaves(self.specs(self.runtime.parameters))
        on_disk = self.runtime.placement.on_disk
        needed = sum(spec.nbytes for spec in specs if on_disk(spec.axes, spec.kind))
        return Files(Scratch(KIND, self.runtime.placement.disk[KIND], needed))

    def claim_disk(self) -> None:
        """Raises `UserError` if the folder cannot be written, or has too little space."""
        self.files.scratch.claim()

    def stored(self, optimizer: Any) -> Any:
        specs, on_disk = leaves(self.specs(self.runtime.parameters)), self.runtime.placement.on_disk
        found = leaves(optimizer)
        for part, own in zip(self._layers.parts, self._layers.divided(optimizer)[0], strict=True):
            of_part = [key for key in own if on_disk(specs[key].axes, KIND)]
            found |= {key: self._array(key, specs[key], part.layers is not None) for key in of_part}
        return rebuilt(optimizer, found)

    def _array(self, key: str, spec: ArraySpec, stacked: bool) -> StoredArray:
        layer = self._layers.specs[key]
        sharding = self.runtime.placement.sharding(layer.axes, layer.kind)
        return StoredArray(self.files, quote(key, safe=""), spec.shape, np.dtype(spec.dtype), sharding, stacked)

    # ---- one layer ------------------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> LayerUpdate:
        return LayerUpdate(self.optimizer, self.runtime.parameters, self.runtime.placement)

    @cached_property
    def _update(self) -> Any:
        layers = self._layers
        return self.runtime.jit(lambda *arguments: layers.update_at(*arguments), donate_argnums=(2, 3))

    @cached_property
    def _initial(self) -> Any:
        layers = self._layers
        return self.runtime.jit(lambda index, values: layers.initial(at(index, values)), keep_unused=True)

    @cached_property
    def _averaged(self) -> Any:
        layers = self._layers

        def averaged(index: Any, values: Any, own: Leaves, shared: Leaves) -> Any:
            return put(index, values, layers.evaluated(at(index, values), own, shared))

        return self.runtime.jit(averaged, donate_argnums=1)
