"""What Axon uses of Orbax: its second interface, which is experimental (orbax-checkpoint 0.12)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from orbax.checkpoint.experimental import v1 as ocp
from orbax.checkpoint.experimental.v1 import training
from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PyTreeHandler
from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyLeafHandler
from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry
from orbax.checkpoint.experimental.v1._src.synchronization.compatibility import FuturesAwaitable

from axon.runtime.stored import StoredArray, is_stored

__all__ = ["ArrayTree", "ocp", "training"]


def _nothing(directory: Any) -> None:
    """What is done once a tree is written, unless there is more to do."""


@dataclass
class ArrayTree:
    """A tree of arrays to save, of which those in files (`StoredArray`) are read and written one after another.

    What is saved is the same as of arrays in memory, and restored as such. Orbax's `StatefulCheckpointable`.

    `when_written`: called in each process with the tree's folder, in the thread that saves, when all processes have
    written their arrays and before the checkpoint counts as complete; if it raises, the save fails.
    """

    tree: Any
    when_written: Callable[[Any], None] = _nothing

    async def save(self, directory: Any) -> Awaitable[None]:
        registry: Any = StandardLeafHandlerRegistry()
        registry.add(_InFiles, _Abstract, _InFilesHandler, secondary_typestrs=["np.ndarray"])
        tree = jax.tree.map(lambda x: _InFiles(x) if is_stored(x) else x, self.tree, is_leaf=is_stored)
        saving: Any = await PyTreeHandler(leaf_handler_registry=registry).save(directory, tree)

        async def save_and_go_on() -> None:
            await saving
            self.when_written(directory.path)

        return FuturesAwaitable(saving.commit_futures, save_and_go_on)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Sets `tree` to what is in `directory`, all of it in memory."""
        reading = await PyTreeHandler().load(directory)

        async def read() -> None:
            self.tree = await reading

        return read()


class _InFiles:
    """A `StoredArray` as a leaf of trees, which it is not by itself."""

    def __init__(self, array: StoredArray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype


class _Abstract:
    """What a handler of leaves is registered for besides, to restore them: here nothing is."""


class _InFilesHandler(NumpyLeafHandler):
    """Saves arrays in files as NumPy arrays."""

    async def serialize(self, params: Sequence[Any], serialization_context: Any) -> Awaitable[None]:
        save = super().serialize

        async def save_in_turn() -> None:
            for param in params:
                await (await save([replace(param, value=param.value.array.whole())], serialization_context))

        return save_in_turn()
