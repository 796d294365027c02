"""Which layers each chunk runs: a model's segments cut so that a tick takes as little time as it can."""

import itertools
import math
from collections.abc import Iterator, Sequence

from axon.parallel.pipeline.chunks import Chunks

NOTHING = -1
"""In place of a period's number: a chunk's place that no period takes."""

Partition = list[range]
"""Of one segment: the periods that each chunk runs, by its logical number."""


def partition(times: Sequence[int], costs: Sequence[float], chunks: int) -> list[Partition]:
    """Segments of `times` periods, one after the other, cut into chunks.

    One program runs every chunk, with places for as many periods of a segment as any chunk has; where a chunk has fewer
    it computes in vain. So a chunk takes `Σ most(segment) · cost(segment)`, and this is the least. What is outside of
    the blocks (embedding, head, loss) is shared by all stages, and weighs on none more than on another.

    Args:
        costs: of one period of each segment, in any unit. chunks: how many to cut into.
    """
    fits = (most for most in _limits(times, chunks) if len(_filled(times, most)) <= chunks)
    most = min(fits, key=lambda most: sum(n * cost for n, cost in zip(most, costs, strict=True)))
    cut = _filled(times, most)
    ends = [[taken[segment].stop for taken in cut] for segment in range(len(times))]
    empty = [[range(end[-1], end[-1])] * (chunks - len(cut)) for end in ends]
    return [[taken[segment] for taken in cut] + empty[segment] for segment in range(len(times))]


def _limits(times: Sequence[int], chunks: int) -> Iterator[tuple[int, ...]]:
    """How many periods of each segment a chunk might have at most: every choice that could be the cheapest.

    Of the last segment only the least that could fit the others.
    """
    *others, last = times
    for most in itertools.product(*(range(1, n + 1) for n in others)):
        for of_last in range(math.ceil(last / chunks), last + 1):
            if len(_filled(times, (*most, of_last))) <= chunks:
                yield (*most, of_last)
                break


def _filled(times: Sequence[int], most: Sequence[int]) -> list[list[range]]:
    """Chunks that each take as many of the next periods as they may, in order: as few as these limits allow."""
    next_one = [0] * len(times)
    found = []
    while next_one != list(times):
        taken, going_on = [], True
        for segment, (n, limit) in enumerate(zip(times, most, strict=True)):
            start = next_one[segment]
            stop = min(n, start + limit) if going_on else start
            taken.append(range(start, stop))
            next_one[segment] = stop
            going_on = going_on and stop == n
        found.append(taken)
    return found


def width(partition: Partition) -> int:
    """Places of each chunk."""
    return max(map(len, partition))


def padding(partition: Partition) -> int:
    """Places that no period takes."""
    return sum(width(partition) - len(periods) for periods in partition)


def numbers(partition: Partition, chunks: Chunks) -> list[list[int]]:
    """`[stage, place]`: the period that runs there, chunk after chunk, or `NOTHING`."""
    places = width(partition)

    def of_stage(stage: int) -> list[int]:
        own = (partition[chunks.logical(stage, chunk)] for chunk in range(chunks.virtual))
        return [number for periods in own for number in (*periods, *[NOTHING] * (places - len(periods)))]

    return [of_stage(stage) for stage in range(chunks.stages)]
