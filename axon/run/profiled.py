"""A run of a few steps, of which nothing is kept but their profile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from axon.checkpoint import Checkpoints
from axon.errors import UserError
from axon.run.folder import RunFolder
from axon.run.saves import NoSaves
from axon.run.session import Session
from axon.run.tree import Train

WARM_UP = 2
"""Steps before the traced ones: the first places what later ones find in place."""


GPU_OPTIONS = {"xla_gpu_enable_command_buffer": ""}
"""XLA's, under those of `Execution.compiler_options`: with CUDA graphs a trace says of a kernel which graph started it,
and not which operation it is."""


def profiled(train: Train, steps: int, folder: Path, report: Callable[[str], None]) -> Path:
    """Train a new run in `folder` for a few steps, as `axon.run.run` would, with `steps` of them traced; the folder of
    the profile. Neither checkpoints nor evaluations, no sample, no trackers.

    Raises `UserError` for a run that has too few steps, or others before it, and for a folder that has a run.
    """
    if train.stages:
        raise UserError(
            f"axon profile: Train.stages ({', '.join(train.stages)}) are runs that would be carried out before. "
            "Profile this one within its run: `axon train CONFIG --profile FIRST:LAST`"
        )
    if (last := WARM_UP + steps) > train.steps:
        raise UserError(
            f"--steps {steps} with {WARM_UP} steps before them are more than Train.steps, {train.steps}: lower --steps"
        )
    if RunFolder(folder).config.is_file():
        raise UserError(f"{folder} (--to) has a run: name a new folder")
    options = {**train.execution.compiler_options, **(GPU_OPTIONS if jax.default_backend() == "gpu" else {})}
    alone = replace(
        train,
        execution=replace(train.execution, compiler_options=options),
        run_dir=str(folder),
        checkpoints=Checkpoints(every=train.steps + 1),
        evaluation=None,
        trackers=(),
        sample=None,
    )
    session = Session(alone, report, NoSaves)
    session.run(last, (WARM_UP + 1, last))
    return session.folder.profile
