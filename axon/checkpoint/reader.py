"""Reading checkpoints: which steps there are, and the state of one of them. Changes nothing on disk."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath

from axon.checkpoint.compare import CheckpointError, DamagedCheckpointError, check_fits, signatures
from axon.checkpoint.orbax import ocp
from axon.checkpoint.ownership import EXTRA, STATE, is_checkpoint
from axon.checkpoint.quiet import quiet_read
from axon.checkpoint.tree import Flat, flat, rebuilt, restorable, subtree, unpadded
from axon.checkpoint.verify import Damage, damage, damage_besides_arrays, wrong_lengths
from axon.disk import reading
from axon.runtime import nested
from axon.runtime.stored import is_stored

UNPADDED = "unpadded"
"""Path → shape without padding, of the arrays that have any: what else reads the checkpoint need not know."""
READ_AT_ONCE = 256 * 2**20
"""Bytes that a process reads at a time, at most, unless one shard of an array is more. Whole chunks are counted."""
_DAMAGE_SHOWN = 5
T = TypeVar("T")


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint's metadata says: the state's leaves, the shapes without padding of some, and `extra`."""

    leaves: Flat
    unpadded: Mapping[str, tuple[int, ...]]
    extra: dict[str, Any]


class Reader:
    """The checkpoints in a folder, one folder per step. Safe while a run is saving into it.

    Before anything of a checkpoint is returned, every byte of it is compared with its checksums, once: while the arrays
    are loaded, so that the disk is read once.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = epath.Path(directory).absolute()
        self._damage: dict[int, list[Damage]] = {}

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending; those of a killed save are left out, and what is no
        checkpoint of Axon's."""
        if not self.directory.is_dir():
            return []
        with reading(str(self.directory)):
            return sorted(int(path.name) for path in self.directory.iterdir() if is_checkpoint(path))

    def latest(self) -> int | None:
        """The last step with a complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def folder(self, step: int | None = None) -> epath.Path:
        """The folder of the checkpoint of `step` (None: the latest). Raises `CheckpointError` if there is none."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.directory}: train first, or give another run directory")
        if step is not None and step not in steps:
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are {steps}")
        return self.directory / str(steps[-1] if step is None else step)

    def restore(self, abstract_state: Any, step: int | None = None, specs: Any = None) -> tuple[Any, dict[str, Any]]:
        """The state and the `extra` saved at `step` (None: the latest), bit for bit.

        `abstract_state` is the state's tree with a shape, dtype and sharding at each leaf (`jax.ShapeDtypeStruct`);
        a leaf without a sharding is returned as a NumPy array, one in files (`StoredArray`) is filled. Shardings may
        differ from those at saving.
        `specs`: the same tree of `ArraySpec`s, if some of it is padded: padding may differ from that at saving too, and
        what there is more of it is 0.
        Raises `CheckpointError` if there is no such checkpoint, it is damaged, cannot be read, or its tree differs.
        """
        folder = self.check_readable(step)
        saved = self._metadata(folder)
        return rebuilt(abstract_state, self._fitting(folder, saved, saved.leaves, abstract_state, specs)), saved.extra

    def restore_parts(
        self,
        abstract: Mapping[str, Any],
        step: int | None = None,
        specs: Mapping[str, Any] | None = None,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Parts of the state saved at `step`, by name, as `{"parameters": …}`. Takes and raises what `restore` does.

        `cast`: dtypes may differ: arrays are cast as they are read.
        """
        folder = self.check_readable(step)
        saved = self._metadata(folder)
        parts = {path: leaf for name in abstract for path, leaf in subtree(saved.leaves, name).items()}
        wanted = {name: part for name, part in abstract.items() if jax.tree.leaves(part)}
        return {**abstract, **rebuilt(wanted, self._fitting(folder, saved, parts, wanted, specs, cast))}

    def offered(self, name: str, step: int | None = None) -> Flat:
        """Shape and dtype of each array of the part `name`, by its path there, without padding. Raises as `restore`."""
        saved = self._metadata(self.folder(step))
        found = signatures(subtree(saved.leaves, name), saved.unpadded)
        return {path.removeprefix(name + "/"): jax.ShapeDtypeStruct(*found[path]) for path in found}

    def restore_arrays(self, name: str, abstract: Flat, step: int | None = None) -> Flat:
        """Some arrays of the part `name`, by their paths there, which are among those `offered`.

        Their shapes may differ by padding, and their dtypes: they are cast as they are read. Raises as `restore`.
        """
        folder = self.check_readable(step)
        stored = self._metadata(folder).leaves
        wanted = {f"{name}/{path}": leaf for path, leaf in abstract.items()}
        loaded = self._while_compared(folder, lambda: self._load(folder, stored, wanted))
        return {path.removeprefix(name + "/"): value for path, value in loaded.items()}

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """The `extra` saved with a state: small JSON, such as the data position. Raises as `restore` does."""
        return self._metadata(self.folder(step)).extra

    def saved_leaves(self, step: int) -> Flat:
        """Shape and dtype of each array of the state saved at `step`, by path, with padding. Raises as `restore`."""
        return self._metadata(self.folder(step)).leaves

    def load_leaf(self, step: int, path: str, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
        """One array of the state saved at `step`, in the host's memory. Raises as `restore` does."""
        return np.asarray(self._load(self._intact(self.folder(step)), {path: abstract}, {path: abstract})[path])

    def damage(self, step: int) -> list[Damage]:
        """Differences from what was saved at `step`.

        All its files are read, at the first call. Of several processes each reads a share, and all have to call.
        """
        if step not in self._damage:
            self._damage[step] = damage(self.directory / str(step), STATE)
        return self._damage[step]

    def damage_besides_arrays(self, step: int) -> list[Damage]:
        """As `damage`, but of the arrays' data only the lengths of their files are compared."""
        if step in self._damage:
            return self._damage[step]
        return damage_besides_arrays(self.directory / str(step), STATE)

    def lacks_files(self, step: int) -> bool:
        """Whether files of a checkpoint are missing or of another length than they were saved with: quick."""
        try:
            return bool(wrong_lengths(self.directory / str(step), STATE))
        except OSError:
            return False

    def check_readable(self, step: int | None = None) -> epath.Path:
        """The folder of a checkpoint in which all but the arrays' data is intact. Raises as `restore` does.

        Of several processes, all of it is: one that failed to load would leave the others in Orbax's barrier.
        """
        folder = self.folder(step)
        if jax.process_count() > 1:
            return self._intact(folder)
        self._raise_for(folder, self.damage_besides_arrays(int(folder.name)))
        return folder

    def _intact(self, folder: epath.Path) -> epath.Path:
        self._raise_for(folder, self.damage(int(folder.name)))
        return folder

    def _raise_for(self, folder: epath.Path, found: Sequence[Damage]) -> None:
        if found:
            advice = "`axon train` can continue from step {}."
            raise self._unreadable(folder, f"it is damaged: {listed(found)}", advice, DamagedCheckpointError)

    def _while_compared(self, folder: epath.Path, load: Callable[[], T]) -> T:
        """What `load` returns, if every byte of the checkpoint is as it was saved: compared while it loads.

        Both read the same files at the same time, so the second to read a byte has it from the page cache.
        """
        with ThreadPoolExecutor(1) as thread:
            comparison = thread.submit(self.damage, int(folder.name))
            try:
                loaded = load()
            except CheckpointError:
                comparison.result()
                self._intact(folder)  # what is damaged says more than how it failed to load
                raise
            comparison.result()
        self._intact(folder)
        return loaded

    def _metadata(self, folder: epath.Path) -> _Saved:
        def read() -> _Saved:
            found = ocp.checkpointables_metadata(folder)
            state = (found.metadata or {}).get(STATE)
            content: Any = found.custom_metadata if isinstance(found.custom_metadata, dict) else {}
            extra, shapes = content.get(EXTRA), content.get(UNPADDED, {})
            # Orbax returns None for what it cannot read.
            if state is None or not isinstance(extra, dict) or not isinstance(shapes, dict):
                raise ValueError("its metadata is missing or damaged")
            return _Saved(flat(state), {path: tuple(shape) for path, shape in shapes.items()}, extra)

        return self._readable(folder, read)

    def _fitting(
        self, folder: epath.Path, saved: _Saved, leaves: Flat, abstract: Any, specs: Any, cast: bool = False
    ) -> Flat:
        """The arrays of `abstract`, which has to have those of the saved `leaves`, but for padding and, if `cast`,
        their dtypes."""
        wanted, here = flat(abstract), unpadded(specs)
        had, has = signatures(leaves, saved.unpadded), signatures(wanted, here)
        if cast:
            has = {path: (shape, had[path][1] if path in had else dtype) for path, (shape, dtype) in has.items()}
        check_fits(str(folder), had, has)
        in_files = {path: leaf for path, leaf in wanted.items() if is_stored(leaf)}
        in_memory = {path: wanted[path] for path in wanted if path not in in_files}

        def load() -> Flat:
            loaded = self._load(folder, saved.leaves, in_memory)
            for path, leaf in in_files.items():  # one by one: together they may be more than fits in memory
                loaded[path] = leaf.fill(self._load(folder, saved.leaves, {path: leaf})[path])
            return loaded

        return self._while_compared(folder, load)

    def _load(self, folder: epath.Path, stored: Flat, abstract: Flat) -> Flat:
        """Arrays by path. `stored`: what the checkpoint's metadata says of these and others."""
        wanted = {path: restorable(leaf) for path, leaf in abstract.items()}
        padded = any(tuple(stored[path].shape) != tuple(leaf.shape) for path, leaf in wanted.items())
        sharded = {path: leaf for path, leaf in wanted.items() if not isinstance(leaf, np.ndarray)}
        largest = max((largest_read(stored[path], leaf) for path, leaf in sharded.items()), default=0)
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        context.array.loading.enable_padding_and_truncation = padded
        context.memory.read_concurrent_bytes = max(READ_AT_ONCE, largest + 1)  # Orbax refuses a read of all of it
        with context:
            loaded = self._readable(folder, lambda: ocp.load_checkpointables(folder, {STATE: nested(wanted)}))
        leaves = flat(loaded[STATE])
        return {p: _of_shape(v, wanted[p].shape) if isinstance(wanted[p], np.ndarray) else v for p, v in leaves.items()}

    def _readable(self, folder: epath.Path, read: Callable[[], T]) -> T:
        try:
            with quiet_read():
                return read()
        except (OSError, ValueError, KeyError) as error:
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            advice = "Delete or move that folder to continue from step {}."
            raise self._unreadable(folder, str(root)[:300] or type(root).__name__, advice) from error

    def _unreadable(
        self, folder: epath.Path, why: str, advice: str, kind: type[CheckpointError] = CheckpointError
    ) -> CheckpointError:
        earlier = [step for step in self.steps() if str(step) != folder.name]
        advice = advice.format(earlier[-1]) if earlier else "It is the only one."
        return kind(f"the checkpoint {folder} cannot be read: {why}\n{advice}")


def listed(found: Sequence[Damage]) -> str:
    """The first few of what is damaged, in one line."""
    more = f"; and {len(found) - _DAMAGE_SHOWN} more" if len(found) > _DAMAGE_SHOWN else ""
    return "; ".join(map(str, found[:_DAMAGE_SHOWN])) + more


def _of_shape(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A NumPy array without its padding, or with zeros for it: Orbax reads such arrays as they are stored."""
    array = np.asarray(value)
    if array.shape == shape:
        return array
    common = tuple(map(slice, map(min, array.shape, shape)))
    result = np.zeros(shape, array.dtype)
    result[common] = array[common]
    return result


def largest_read(stored: Any, wanted: Any) -> int:
    """Bytes of the chunks that the largest read of an array needs, of those that this process does: one per shard.

    `stored`: its metadata in the checkpoint. `wanted`: its shape, which may differ by padding, its sharding, and its
    dtype, in which the bytes are counted.
    """
    storage = getattr(stored, "storage_metadata", None)
    chunk = (storage and storage.chunk_shape) or stored.shape
    indices = wanted.sharding.addressable_devices_indices_map(tuple(wanted.shape)).values()
    reads = (math.prod(map(_places_read, index, wanted.shape, stored.shape, chunk)) for index in indices)
    return wanted.dtype.itemsize * max(reads, default=0)


def _places_read(part: slice, size: int, stored: int, chunk: int) -> int:
    """The places of a dimension in those chunks that have any of a part of it."""
    start, stop, _ = part.indices(size)
    chunk = max(1, chunk)  # of a dimension without places
    return -(-min(stop, stored) // chunk) * chunk - min(start, stored) // chunk * chunk
