"""Damaged checkpoints are renamed before a run goes on, so that it continues from the newest intact one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from etils import epath

from axon.checkpoint.compare import CheckpointError, DamagedCheckpointError
from axon.checkpoint.reader import Reader, listed
from axon.disk import free_name

T = TypeVar("T")
R = TypeVar("R", bound=Reader)


def newest_intact(stores: Sequence[Any], load: Callable[[], T], notices: list[str]) -> T:
    """What `load` returns, which restores the latest checkpoint of all `stores`; if damaged, the newest intact one.

    `stores`: of type `Store`. `notices` gets a line about each that is set aside.
    Raises `CheckpointError`, and renames nothing, if every checkpoint is damaged.
    """
    try:
        latest_of(stores).check_readable()
        return load()
    except DamagedCheckpointError:
        pass  # and what was loaded goes with it: two states may be more than fits in memory
    notices += set_aside_damaged(stores)
    for store in stores:
        store.renamed()
    return load()


def latest_of(stores: Sequence[R]) -> R:
    """The one that has the latest checkpoint; the first, if none has any."""
    return max(stores, key=lambda store: -1 if (step := store.latest()) is None else step)


def set_aside_damaged(readers: Sequence[Reader]) -> list[str]:
    """Renames the checkpoints later than the newest intact one of all `readers`; a line about each.

    Nothing is deleted: step 8 becomes the folder `8.damaged`, so that step 8 can be saved again. Every process has to
    call, and process 0 renames. Raises `CheckpointError`, and renames nothing, if every checkpoint is damaged.
    """
    damaged: dict[epath.Path, str] = {}
    intact = None
    for step, reader in sorted(((s, r) for r in readers for s in r.steps()), key=lambda one: one[0], reverse=True):
        if not (found := reader.damage(step)):
            intact = step
            break
        damaged[reader.directory / str(step)] = listed(found)
    if damaged and intact is None:
        raise CheckpointError(
            f"every checkpoint in {' and '.join(str(reader.directory) for reader in readers)} is damaged:\n"
            + "\n".join(f"  step {folder.name}: {what}" for folder, what in damaged.items())
            + "\nRestore them from a copy, or give another --run-dir to begin anew"
        )
    names = {folder: free_name(Path(folder), ".damaged") for folder in damaged}
    if damaged and jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("axon: names of damaged checkpoints")
        _rename(names)
        sync_global_devices("axon: damaged checkpoints set aside")
    else:
        _rename(names)
    return [
        f"checkpoint {folder.name} is damaged: {what}. It is kept as {names[folder]}; continuing from step {intact}"
        for folder, what in damaged.items()
    ]


def _rename(names: Mapping[epath.Path, Path]) -> None:
    if jax.process_index() == 0:
        for folder, name in names.items():
            folder.rename(name)
