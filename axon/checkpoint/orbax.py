"""What Axon uses of Orbax: its second interface, which is experimental (orbax-checkpoint 0.12)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import tensorstore as ts
from orbax.checkpoint._src.futures.future import CommitFutureAwaitingContractedSignals
from orbax.checkpoint._src.serialization.ocdbt_utils import get_process_index_for_subdir
from orbax.checkpoint._src.serialization.tensorstore_utils import build_array_write_spec
from orbax.checkpoint._src.serialization.type_handlers import NumpyHandler
from orbax.checkpoint.experimental import v1 as ocp
from orbax.checkpoint.experimental.v1 import training
from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PyTreeHandler
from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyLeafHandler
from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry
from orbax.checkpoint.experimental.v1._src.synchronization.compatibility import FuturesAwaitable

from axon.runtime.stored import StoredArray, is_stored

__all__ = ["ArrayTree", "ocp", "saving", "training"]

_FILE_BYTES = 64 * 2**20
_CHUNK_BYTES = 16 * 2**20


def saving() -> Any:
    """Orbax's settings for a save, as a context manager.

    No compression: weights shrink by 8 % at zstd's level 3, which costs many times the processor time of all else.
    Files of 64 MiB are written while the arrays after them are copied; of one of 2 GB, Orbax's default, nothing is
    written before the last array. Chunks of 16 MiB at most: a shard reads whole chunks, and on another mesh an array
    that one device had is read in parts.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    return context


def _nothing(directory: Any) -> None:
    """What is done once a tree is written, unless there is more to do."""


@dataclass
class ArrayTree:
    """A tree of arrays to save, of which those in files (`StoredArray`) are read and written block by block.

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

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self._handler_impl = _InBlocks()


class _InBlocks(NumpyHandler):
    """Writes arrays in files one after another, block by block: one is written while the next is read."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        async def save_in_turn() -> None:
            for value, info, arg in zip(values, infos, args, strict=True):
                await self._save(value.array, info, arg)

        return [CommitFutureAwaitingContractedSignals(save_in_turn(), name="arrays in files")]

    async def _save(self, array: StoredArray, info: Any, arg: Any) -> None:
        await info.await_path_creation()
        process = get_process_index_for_subdir(use_ocdbt=info.is_ocdbt_checkpoint)
        spec = build_array_write_spec(
            info,
            arg,
            global_shape=array.shape,
            local_shape=array.grid,
            dtype=array.dtype,
            use_ocdbt=info.is_ocdbt_checkpoint,
            process_index=process,
        )
        if jax.process_index() != 0:
            return
        store = await ts.open(ts.Spec(spec.json), create=True, open=True, context=info.ts_context)
        writing: Any = None
        for where, value in array.blocks():
            begun = store[where].write(value, can_reference_source_data_indefinitely=True)
            if writing is not None:
                await writing
            writing = begun
        if writing is not None:
            await writing
