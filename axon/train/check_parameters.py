"""Parameters that a caller passes, checked against those of the model."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from axon.axes.array_spec import Specs
from axon.errors import UserError, did_you_mean, suggest

SHOWN = 20


def check_parameters(
    values: Any,
    parameters: Specs,
    what: str = "the parameters given are not the model's:",
    cast: bool = False,
    padded: bool = False,
) -> None:
    """Raise one `UserError` that lists what is missing, unexpected, or of another shape or dtype.

    Args:
        values: arrays, or what has their shape and dtype, as dictionaries within dictionaries or by path.
        parameters: path → specification. what: the message's first line. cast: dtypes may differ. padded:
            arrays may be as they are stored, with the layers that `Layout.pad_layers` adds.
    """
    given = _by_path(values)
    unknown = given.keys() - parameters
    missing = [f"{path}: missing.{did_you_mean(path, unknown)}" for path in parameters if path not in given]
    extra = [f"{path}: not a parameter of the model.{suggest(path, parameters)}" for path in unknown]
    both = [(path, given[path], spec) for path, spec in parameters.items() if path in given]
    shapes = [
        f"{p}: shape {tuple(v.shape)}, the model's is {s.logical_shape}"
        for p, v, s in both
        if tuple(v.shape) not in (s.logical_shape, *([s.shape] if padded else []))
    ]
    dtypes = [
        f"{p}: dtype {np.dtype(v.dtype)}, the model's is {np.dtype(s.dtype)}"
        for p, v, s in both
        if not cast and tuple(v.shape) == s.logical_shape and np.dtype(v.dtype) != np.dtype(s.dtype)
    ]
    if lines := missing + sorted(extra) + shapes + dtypes:
        more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise UserError("\n  ".join([what, *lines[:SHOWN], *more]))


def _by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(values)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        for path, leaf in leaves
    }
