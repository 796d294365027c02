"""The parts that a pipeline runs: a model and its objective, parted at the model's depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array

from axon.parallel.pipeline.partition import Partition


@dataclass(frozen=True)
class Parts:
    """What a model and its objective are made of, as pure functions, and one batch.

    Args:
        first: `(outer, microbatch number) → x`, what comes before the blocks.
        chunk: `(trained, fixed, numbers, x, inputs, active) → (x, extras, statistics)`, some blocks: of each segment
            the periods with these numbers, or `NOTHING`; where not `active`, in a tick in which the stage is idle, for
            nobody: it may do less, but must meet the collectives of the others. `extras` is a tree of scalars that
            are added up over the chunks that a microbatch goes through, `statistics` one of arrays, for each segment,
            with an axis `layers` in front, without gradients, that are added up over microbatches.
        last: `(outer, x, extras, microbatch number) → (what is minimised, sums)`, what comes after the blocks.
        trained, fixed: of each segment the blocks' arrays, with an axis `layers` in front that lies on `pipe`;
            gradients are made for `trained`. outer: the parameters that are not of the blocks.
        inputs: what blocks are given of each microbatch, with an axis in front that counts these.
        partition: of each segment, the periods that each chunk runs.
    """

    first: Callable[[Any, Array], Array]
    chunk: Callable[[Any, Any, Any, Array, Any, Any], tuple[Array, Any, Any]]
    last: Callable[[Any, Array, Any, Array], tuple[Array, Any]]
    trained: Sequence[Any]
    fixed: Sequence[Any]
    outer: Any
    inputs: Any
    partition: Sequence[Partition]
