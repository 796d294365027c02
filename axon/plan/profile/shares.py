"""Whose a moment is in which a device does several things at once."""

from collections.abc import Sequence

Interval = tuple[float, float, int]
"""Begin, end and rank."""


def exclusive(intervals: Sequence[Interval]) -> list[float]:
    """Of each interval the time that is its own; together the time in which there is any.

    A moment belongs to the intervals of the highest rank in it, to several in equal parts: what is sent while products
    run takes no time of its own, and a loop only that in which nothing of its body runs.
    """
    own = [0.0] * len(intervals)
    bounds = sorted(
        [(end, 0, number) for number, (_, end, _) in enumerate(intervals)]
        + [(begin, 1, number) for number, (begin, _, _) in enumerate(intervals)]
    )
    running: dict[int, int] = {}
    before = 0.0
    for moment, begins, number in bounds:
        if running and moment > before:
            _share(moment - before, running, own)
        before = moment
        if begins and intervals[number][1] > moment:
            running[number] = intervals[number][2]
        else:
            running.pop(number, None)
    return own


def _share(time: float, running: dict[int, int], own: list[float]) -> None:
    highest = max(running.values())
    first = [number for number, rank in running.items() if rank == highest]
    for number in first:
        own[number] += time / len(first)
