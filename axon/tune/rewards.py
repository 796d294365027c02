"""Rewards: functions that say how good a sampled answer is."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np

from axon.checks import check_range
from axon.errors import UserError
from axon.own_code import written_at

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Sampled:
    """An answer that the model has sampled, as a reward is given it.

    Args:
        prompt, answer: their texts. ids: the answer's tokens, its end included.
        ended: whether the model ended it, and not the limit of tokens or turns.
        reference: the right answer's text, empty where there is none. record: the prompt's columns in its source.
        where: the prompt, for messages. turns: with an environment, the texts of the model and of the environment in
            turn; then `answer` is the last one of the model, and `ids` are those of all of its own.
    """

    prompt: str
    answer: str
    ids: tuple[int, ...]
    ended: bool = True
    reference: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    turns: tuple[str, ...] = ()


RewardFunction = Callable[[Sampled], Any]
"""How good an answer is: a finite number, the higher the better; True is 1. Or a coroutine that gives it."""


@runtime_checkable
class NeedsMachine(Protocol):
    """A reward that needs more of the machine than Python's standard library."""

    def check(self) -> None:
        """Raise `UserError` where it cannot be asked here."""
        ...


def installed(reward: str, module: str) -> Any:
    """A module that a reward needs. Raises `UserError` where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{reward} needs {error.name}: pip install 'axon-jax[rewards]'") from None


@dataclass(frozen=True)
class ExactMatch:
    """1 if the answer has ended and is the right one, spaces at both ends left out, otherwise 0."""

    def __call__(self, sampled: Sampled) -> float:
        return float(sampled.ended and sampled.answer.strip() == sampled.reference.strip())


@dataclass(frozen=True)
class Similar:
    """The share of characters that the answer, spaces at both ends left out, and the right one have in common, in
    order: 2·matches / (both lengths), as `difflib.SequenceMatcher.ratio`; 0 for an answer that has not ended.

    It says of a wrong answer how far it is from the right one, where right ones are rare at first."""

    def __call__(self, sampled: Sampled) -> float:
        pair = sampled.answer.strip(), sampled.reference.strip()
        return SequenceMatcher(None, *pair, autojunk=False).ratio() if sampled.ended else 0.0


@dataclass(frozen=True)
class Numeric:
    """1 if the last number of the answer is within `tolerance` of the last of the right one, otherwise 0.

    Raises `ValueError` for a right answer without a number."""

    tolerance: float = 1e-6

    def __post_init__(self):
        check_range(self, "[0, inf)", "tolerance")

    def __call__(self, sampled: Sampled) -> float:
        if (expected := _last_number(sampled.reference)) is None:
            raise ValueError(f"the right answer has no number: {sampled.reference!r}")
        actual = _last_number(sampled.answer)
        return float(actual is not None and abs(actual - expected) <= self.tolerance)


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


@dataclass(frozen=True)
class Matches:
    """1 if the whole answer matches the regular expression `pattern`, in which "." is any character; otherwise 0."""

    pattern: str

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"Matches.pattern is {self.pattern!r}, no regular expression: {error}") from None

    def __call__(self, sampled: Sampled) -> float:
        return float(re.fullmatch(self.pattern, sampled.answer, re.DOTALL) is not None)


@dataclass(frozen=True)
class Overlong:
    """0 for an answer of up to `tokens` − `margin` tokens, from there falling evenly to −1 at `tokens` (DAPO, Yu et
    al., arXiv:2503.14476, equation 13)."""

    tokens: int
    margin: int

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "tokens", "margin")

    def __call__(self, sampled: Sampled) -> float:
        return -min(max((len(sampled.ids) - self.tokens + self.margin) / self.margin, 0.0), 1.0)


def finite(said: Any) -> float:
    """What a reward gives, as a number. Raises an error that it is, and `TypeError` for anything else."""
    if isinstance(said, Exception):
        raise said
    if not isinstance(said, bool | int | float | np.bool_ | np.number) or not math.isfinite(said):
        raise TypeError(f"gives {said!r}; must be a finite number, or True or False")
    return float(said)


def check_rewards(
    rewards: Mapping[str, RewardFunction],
    weights: Mapping[str, float],
    field: str,
    known: Sequence[str] = (),
    needed: bool = True,
) -> None:
    """Raise `UserError` for a reward that cannot be called with an answer or has a name of `known`, those that are
    there besides, for a weight of none, and where one is `needed` and none there. `field`: their name."""
    if needed and not rewards and not known:
        raise UserError(f"{field} is empty: give at least one, as {{'exact': @ExactMatch()}}")
    for name, reward in rewards.items():
        try:
            inspect.signature(reward).bind("sampled")
        except TypeError as error:
            raise UserError(
                f"{field}[{name!r}] ({place_of(reward)}) cannot be called with an answer, {error}: must be a function "
                "reward(sampled), as of axon.tune.rewards.Sampled"
            ) from None
    if taken := sorted(rewards.keys() & {*known}):
        raise UserError(f"{field}[{taken[0]!r}] has the name of another reward; rename it")
    if unknown := sorted(weights.keys() - rewards.keys() - {*known}):
        names = ", ".join([*known, *rewards]) or "none"
        raise UserError(f"the weights of {field} name {unknown[0]!r}; expected of {names}")


def place_of(reward: RewardFunction) -> str:
    """Where a reward is defined, for messages."""
    return written_at(reward if inspect.isroutine(reward) else type(reward))
