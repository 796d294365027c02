"""Damaged checkpoints are renamed before a run goes on, so that it continues from the newest intact one."""

import jax
from etils import epath

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.reader import Reader, listed


def set_aside_damaged(reader: Reader) -> list[str]:
    """Renames the checkpoints later than the newest intact one; a line about each, and about one without checksums.

    Nothing is deleted: step 8 becomes the folder `8.damaged`, so that step 8 can be saved again. Every process has to
    call, and process 0 renames. Raises `CheckpointError`, and renames nothing, if every checkpoint is damaged.
    """
    damaged, intact = {}, None
    for step in reversed(reader.steps()):
        if not (found := reader.damage(step)):
            intact = step
            break
        damaged[step] = listed(found)
    if damaged and intact is None:
        raise CheckpointError(
            f"every checkpoint in {reader.directory} is damaged:\n"
            + "\n".join(f"  step {step}: {what}" for step, what in damaged.items())
            + "\nRestore them from a copy, or give another --run-dir to begin anew"
        )
    names = {step: _free_name(reader.directory, step) for step in damaged}
    if damaged and jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("axon: names of damaged checkpoints")
        _rename(names)
        sync_global_devices("axon: damaged checkpoints set aside")
    else:
        _rename(names)
    lines = [
        f"checkpoint {step} is damaged: {what}. It is kept as {names[step]}; continuing from step {intact}"
        for step, what in damaged.items()
    ]
    if intact is not None and reader.damage(intact) is None:
        lines.append(f"checkpoint {intact} was saved without checksums: whether it is damaged is not known")
    return lines


def _free_name(directory: epath.Path, step: int) -> epath.Path:
    name, number = directory / f"{step}.damaged", 1
    while name.exists():
        number += 1
        name = directory / f"{step}.damaged-{number}"
    return name


def _rename(names: dict[int, epath.Path]) -> None:
    if jax.process_index() == 0:
        for step, name in names.items():
            (name.parent / str(step)).rename(name)
