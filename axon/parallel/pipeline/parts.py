"""The parts that a pipeline runs: a model and its objective, parted at the model's depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.parallel.pipeline.partition import Partition


def added(one: Any, other: Any) -> Any:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, one, other)


def largest(one: Any, other: Any) -> Any:
    """The larger of each value of two trees."""
    return jax.tree.map(jnp.maximum, one, other)


def zeros(shapes: Any) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)


@dataclass(frozen=True)
class Parts:
    """What a model and its objective are made of, as pure functions, and one batch.

    Args:
        first: `(outer, microbatch number) → x`, what comes before the blocks.
        chunk: `(trained, fixed, reports, numbers, x, inputs, active) → (x, extras, statistics)`, some blocks: of each
            segment the periods with these numbers, or `NOTHING`; where not `active`, in a tick in which the stage is
            idle, for nobody: it may do less, but must meet the collectives of the others. `extras` is a tree of scalars
            that are added up over the chunks that a microbatch goes through, `statistics` one of arrays, for each
            segment, with an axis `layers` in front, without gradients, of which `pair` makes one over microbatches.
        last: `(outer, x, extras, microbatch number) → (what is minimised, sums)`, what comes after the blocks.
        trained, fixed: of each segment the blocks' arrays, with an axis `layers` in front that lies on `pipe`;
            gradients are made for `trained`. outer: the parameters that are not of the blocks.
        inputs: what blocks are given of each microbatch, with an axis in front that counts these.
        partition: of each segment, the periods that each chunk runs.
        reports: of each segment, by path, the shapes of the statistics that operations report (`axon.axes.statistics`);
            `chunk` is given their reports, by path, or nothing where none is wanted.
        pair: two trees of statistics → one. pair_sums: what the microbatches before gave, and the `sums` of one more →
            what all gave. no_sums: the shapes of `sums` → what no microbatch gives.
    """

    first: Callable[[Any, Array], Array]
    chunk: Callable[[Any, Any, Any, Any, Array, Any, Any], tuple[Array, Any, Any]]
    last: Callable[[Any, Array, Any, Array], tuple[Array, Any]]
    trained: Sequence[Any]
    fixed: Sequence[Any]
    outer: Any
    inputs: Any
    partition: Sequence[Partition]
    reports: Sequence[Mapping[str, tuple[int, ...]]]
    pair: Callable[[Any, Any], Any] = added
    pair_sums: Callable[[Any, Any], Any] = added
    no_sums: Callable[[Any], Any] = zeros
