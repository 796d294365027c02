"""When everything happens, if each stage does its work in order and each piece as soon as it has what it needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from axon.errors import UserError
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.table import Step, Work, needs, result, step_of

Piece = tuple[Work, ...]
"""Work that a stage does as one: it needs all inputs at its start, and its results come at its end. Mostly of one."""


class Timed(NamedTuple):
    """A piece of work, and from when to when it runs."""

    start: float
    end: float
    stage: int
    piece: Piece


def timeline(orders: Sequence[Sequence[Piece]], chunks: Chunks, cost: Callable[[Piece], float]) -> list[Timed]:
    """All pieces in order of their start. `orders` has each stage's in turn; sends take no time.

    What no stage does in `orders` is taken as done before. Raises `UserError` for orders that wait for each other.
    """
    steps = [
        [[step_of(stage, work, chunks) for work in piece] for piece in order] for stage, order in enumerate(orders)
    ]
    planned = {result(step) for order in steps for piece in order for step in piece}
    ended: dict[Step, float] = {}
    timed: list[Timed] = []
    position, free = [0] * len(orders), [0.0] * len(orders)
    stage, waiting = 0, 0
    while waiting < len(orders):
        waiting += 1
        while position[stage] < len(steps[stage]):
            made, piece = steps[stage][position[stage]], orders[stage][position[stage]]
            inputs = [need for step in made for need in needs(step, chunks) if need in planned]
            if any(need not in ended for need in inputs):
                break
            start = max([free[stage], *(ended[need] for need in inputs)])
            free[stage] = start + cost(piece)
            ended.update((result(step), free[stage]) for step in made)
            timed.append(Timed(start, free[stage], stage, piece))
            position[stage] += 1
            waiting = 0
        stage = (stage + 1) % len(orders)
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            (work, *_) = order[position[stage]]
            raise UserError(f"stage {stage} waits for ever to do {work}: the orders of the stages form a circle")
    return sorted(timed)
