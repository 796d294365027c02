"""Rewards that tests name, as a configuration does."""

import time

from axon.errors import Unavailable


def short(sampled) -> float:
    """The shorter, the better; of equals the one that has the prompt's first letter more often."""
    return -len(sampled.answer) + 0.01 * sampled.answer.count(sampled.prompt[:1])


def never(sampled) -> bool:
    return False


def no_arguments() -> bool:
    return True


def text(sampled) -> str:
    return sampled.answer


def undefined(sampled) -> float:
    return float("nan")


def raises(sampled) -> float:
    raise KeyError(sampled.answer)


def ends(sampled) -> float:
    raise SystemExit(3)


def hangs(sampled) -> float:
    time.sleep(30)
    return 1.0


def third_fails(sampled) -> float:
    """Of answers whose first id is a multiple of 3, none."""
    return float("inf") if sampled.ids[0] % 3 == 0 else float(sampled.ids[0])


LEFT: list[int] = [10**6]
"""How many answers `judged` is there for."""


def judged(sampled) -> float:
    LEFT[0] -= 1
    if LEFT[0] < 0:
        raise Unavailable("the judge does not answer")
    return len(set(sampled.ids)) + 0.01 * (sampled.ids[0] % 7)
