"""Whether a checkpoint fits a state: compared by metadata, before any array is read."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axon.checkpoint.tree import Flat, is_key, key_bits
from axon.errors import UserError

Signature = tuple[tuple[int, ...], str]  # shape, dtype
_SHOWN = 20


class CheckpointError(UserError):
    """A checkpoint that is not there, cannot be read or written, or does not fit the run's state."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes are not those that were saved."""


def signatures(leaves: Flat, unpadded: Mapping[str, tuple[int, ...]]) -> dict[str, Signature]:
    """Shape and dtype of each leaf as they are on disk, by path, but for padding; `unpadded`: shapes without it."""
    found = {path: _signature(key_bits(leaf) if is_key(leaf) else leaf) for path, leaf in leaves.items()}
    return {path: (unpadded.get(path, shape), dtype) for path, (shape, dtype) in found.items()}


def _signature(leaf: Any) -> Signature:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(leaf.shape), np.dtype(leaf.dtype).name


def differences(saved: Mapping[str, Signature], wanted: Mapping[str, Signature]) -> list[str]:
    """One line for each path at which a checkpoint and a state differ: missing, extra, shape, dtype."""
    missing = [f"{path}: missing from the checkpoint" for path in wanted if path not in saved]
    extra = [f"{path}: only in the checkpoint" for path in saved if path not in wanted]
    both = [(path, saved[path], wanted[path]) for path in wanted if path in saved]
    shapes = [f"{p}: shape {a[0]} in the checkpoint, {b[0]} here" for p, a, b in both if a[0] != b[0]]
    dtypes = [f"{p}: dtype {a[1]} in the checkpoint, {b[1]} here" for p, a, b in both if a[0] == b[0] and a[1] != b[1]]
    return missing + extra + shapes + dtypes


def check_fits(folder: str, saved: Mapping[str, Signature], wanted: Mapping[str, Signature]) -> None:
    """Raises one `CheckpointError` that lists every path at which the checkpoint in `folder` differs from a state."""
    lines = differences(saved, wanted)
    if not lines:
        return
    shown = lines[:_SHOWN] + ([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
    raise CheckpointError(
        f"the checkpoint {folder} does not fit this run's state; "
        f"{len(lines)} of {len({*saved, *wanted})} arrays differ:\n"
        + "\n".join(f"  {line}" for line in shown)
        + "\nUse the model and optimizer it was saved with (config.gin in its run directory), or start a new run."
    )
