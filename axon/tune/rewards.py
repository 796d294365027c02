"""Rewards: functions that say how good a sampled answer is. What one does wrong costs the answer, never the run."""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from queue import Empty, Queue
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np

from axon.checks import check_range
from axon.data.records import Record
from axon.errors import UserError
from axon.launch.agree import from_process_0
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
    record: Record = field(default_factory=dict)
    where: str = ""
    turns: tuple[str, ...] = ()


RewardFunction = Callable[[Sampled], Any]
"""How good an answer is: a finite number, the higher the better; True is 1. Or a coroutine that gives it."""


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


@dataclass(frozen=True)
class Scores:
    """What rewards say of some answers, each in their order; NaN where one failed.

    Args:
        each: name of a reward → numbers. total: their weighted sums.
    """

    each: Mapping[str, np.ndarray]
    total: np.ndarray

    @property
    def named(self) -> dict[str, np.ndarray]:
        """The sums under `reward`, and what each reward says under `reward_NAME`; nothing where there are none."""
        total = {"reward": self.total} if self.each else {}
        return total | {f"reward_{name}": values for name, values in self.each.items()}

    def __add__(self, other: "Scores") -> "Scores":
        each = {name: np.concatenate((values, other.each[name])) for name, values in self.each.items()}
        return Scores(each, np.concatenate((self.total, other.total)))


def without_failed(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of the scores that are numbers, by name; a name of which none is left is left out."""
    real = {name: values[~np.isnan(values)] for name, values in scores.items()}
    return {name: values for name, values in real.items() if len(values)}


class Judge:
    """Asks several rewards of answers, in a thread of their own. Of several processes the first alone asks, and all
    have its scores.

    Args:
        rewards: by name. weights: name → a factor, by default 1. limit: seconds that a reward has for an answer.
        report: called with a line for each reward that failed of some answers.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        limit: float,
        report: Callable[[str], None] = print,
    ):
        self._rewards, self._weights, self._report = rewards, weights, report
        self._call = TimeLimited(limit)

    def __call__(self, answers: Sequence[Sampled], known: Mapping[str, np.ndarray] = MappingProxyType({})) -> Scores:
        """`known`: name → numbers that are there already; an answer of which one is NaN is not asked about."""
        there = [place for place in range(len(answers)) if not any(np.isnan(one[place]) for one in known.values())]
        asked = {name: partial(self._asked, name, reward, answers, there) for name, reward in self._rewards.items()}
        each = {**known, **{name: np.array(from_process_0("rewards", ask), float) for name, ask in asked.items()}}
        weighted = [self._weights.get(name, 1.0) * values for name, values in each.items()]
        return Scores(each, np.sum([np.zeros(len(answers)), *weighted], axis=0))

    def close(self) -> None:
        """End the thread."""
        self._call.close()

    def _asked(
        self, name: str, reward: RewardFunction, answers: Sequence[Sampled], there: Sequence[int]
    ) -> list[float]:
        found, failures = [math.nan] * len(answers), []
        for place in there:
            try:
                found[place] = finite(self._call(reward, answers[place]))
            except Exception as error:
                failures.append((answers[place], error))
        if failures:
            sampled, error = failures[0]
            self._report(
                f"the reward {name!r} ({place_of(reward)}) failed for {len(failures)} of {len(answers)} answers, which "
                f"are not trained on: of {sampled.answer!r:.80} to {sampled.where}: {type(error).__name__}: {error}"
            )
        return found


def finite(said: Any) -> float:
    """What a reward gives, as a number. Raises `TypeError` for anything else."""
    if not isinstance(said, bool | int | float | np.bool_ | np.number) or not math.isfinite(said):
        raise TypeError(f"gives {said!r}; must be a finite number, or True or False")
    return float(said)


class TimeLimited:
    """Calls functions and coroutines in a thread, one after the other, these in an event loop of that thread. One that
    lasts longer than `limit` seconds is left alone with its thread, which Python cannot end, and the next has
    another."""

    def __init__(self, limit: float):
        self._limit = limit
        self._begin()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns or raises; in place of `SystemExit` and its like, `RuntimeError`. Raises
        `TimeoutError` after the limit."""
        result: Queue[tuple[Any, BaseException | None]] = Queue()
        self._calls.put((function, args, result))
        try:
            value, error = result.get(timeout=self._limit)
        except Empty:
            self.close()  # once the call is over, if ever it is
            self._begin()
            raise TimeoutError(f"not done after {self._limit:g} seconds") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(repr(error))
        return value

    def close(self) -> None:
        """End the thread after the call that it is at."""
        self._calls.put(None)

    def _begin(self) -> None:
        self._calls: Queue[Any] = Queue()
        Thread(target=_work, args=(self._calls, self._limit), daemon=True).start()


def _work(calls: Queue[Any], limit: float) -> None:
    loop = asyncio.Runner()
    while (call := calls.get()) is not None:
        function, args, result = call
        try:
            value = function(*args)
            result.put((loop.run(asyncio.wait_for(value, limit)) if inspect.isawaitable(value) else value, None))
        except BaseException as error:  # one that ended the thread would be waited for
            result.put((None, error))
    loop.close()


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
