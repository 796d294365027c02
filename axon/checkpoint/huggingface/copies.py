"""Arrays that a file has besides, as copies of others: whether they are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.config import value_at
from axon.checkpoint.huggingface.weights import Weights
from axon.nn.hugging_face import Architecture, Copy

BLOCK = 16 * 2**20
"""Bytes of each of two arrays that are compared at once."""


def with_own_arrays(table: Architecture, model: Any, weights: Weights) -> tuple[Any, list[str]]:
    """`model`, as the weights have it where config.json does not say it, or says another thing of copies; and what a
    person should know of that.

    An array that is there under the name of its copy alone gets its own. Raises `CheckpointError` for a copy that
    differs, of a model that has no array of its own for it.
    """
    remarks = []
    for field, name in table.present.items():
        model = replace(model, **{field: _stored_name(weights, name, table.optional_prefix) is not None})
    for copy in table.copies:
        theirs, of = (_stored_name(weights, name, table.optional_prefix) for name in (copy.theirs, copy.of))
        if theirs is None:
            model = replace(model, **copy.absent)
        elif not _is_own(copy, model):
            if of is None:
                weights.rename(theirs, copy.of)
            elif not _equal(weights, theirs, of):
                model = _untied(copy, model, weights)
                fields = ", ".join(f"{name} = {value}" for name, value in copy.untied.items())
                remarks.append(
                    f"{copy.theirs} differs from {copy.of}, though config.json ties them: it is read ({fields})"
                )
    return model, remarks


def _stored_name(weights: Weights, name: str, prefix: str) -> str | None:
    return next((one for one in (name, name.removeprefix(prefix)) if one in weights), None)


def _is_own(copy: Copy, model: Any) -> bool:
    return bool(copy.untied) and all(value_at(model, name) == value for name, value in copy.untied.items())


def _untied(copy: Copy, model: Any, weights: Weights) -> Any:
    if not copy.untied:
        raise CheckpointError(
            f"{weights.folder}: {copy.theirs} differs from {copy.of}; {type(model).__name__} has one array for both"
        )
    return replace(model, **copy.untied)


def _equal(weights: Weights, one: str, other: str) -> bool:
    shape = weights.shape(one)
    return shape == weights.shape(other) and all(
        np.array_equal(weights.read(one, where), weights.read(other, where), equal_nan=True)
        for where in _blocks(shape, weights.item_size(one))
    )


def _blocks(shape: tuple[int, ...], item: int) -> Iterator[tuple[slice, ...]]:
    """Ranges of rows, each of about `BLOCK` bytes."""
    rows = max(1, BLOCK // max(1, item * int(np.prod(shape[1:], dtype=np.int64))))
    for start in range(0, shape[0] if shape else 1, rows):
        yield tuple(slice(start, start + rows) if axis == 0 else slice(None) for axis in range(len(shape)))
