"""Partial rollouts: long episodes continue in the next steps, by the weights of those."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from axon.errors import UserError
from axon.serve.request import Sampling
from axon.train.state import State
from axon.tune.episodes import Episode
from axon.tune.policy_sampler import Noise, Player
from axon.tune.prompt import Prompt
from axon.tune.starts import Start

WHOLE = ("min_tokens", "stop", "presence_penalty", "frequency_penalty")
"""Fields of `Sampling` that look at an answer from its beginning on."""


def check_partial(sampling: Sampling, partial: int) -> None:
    """Raise `UserError` for sampling that cannot be continued."""
    values, plain = vars(sampling), vars(Sampling())
    if partial and (whole := [name for name in WHOLE if values[name] != plain[name]]):
        raise UserError(
            f"Rollouts.partial is {partial}, and Sampling.{whole[0]} {values[whole[0]]!r}, which looks at an answer "
            "from its beginning: leave one of the two out"
        )


@dataclass
class PartialEpisode:
    """An episode so far, the step after which each token was sampled that is of the model, and in how many `parts`."""

    episode: Episode = Episode((), False, goes_on=True)
    versions: list[int] = field(default_factory=list)
    parts: int = 0

    def add(self, episode: Episode, version: int) -> None:
        """Take what the episode is with what was sampled after step `version`."""
        count = int(episode.sampled.sum())
        self.episode, self.versions = episode, [*self.versions, *[version] * count][:count]
        self.parts += 1

    def saved(self) -> dict[str, Any]:
        """The episode as JSON."""
        return {**vars(self), "episode": self.episode.saved()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "PartialEpisode":
        """The episode that `saved` wrote."""
        return cls(Episode.restored(saved["episode"]), saved["versions"], saved["parts"])


@dataclass(frozen=True)
class PartialBatch:
    """Batch `number`: prompts, and so many episodes of each in a row."""

    number: int
    prompts: Sequence[Prompt]
    episodes: Sequence[PartialEpisode]

    def saved(self) -> dict[str, Any]:
        """The episodes as JSON."""
        return {"number": self.number, "episodes": [one.saved() for one in self.episodes]}

    @property
    def versions(self) -> np.ndarray:
        """Of all tokens, the steps after which they were sampled."""
        return np.array([version for one in self.episodes for version in one.versions])


class PartialSampler:
    """Samples episodes part by part.

    Args:
        player: samples. noise: how an answer is drawn. samples: episodes of a prompt. most: tokens of an episode in a
            step, unless that trains on it.
    """

    def __init__(self, player: Player, noise: Noise, samples: int, most: int):
        self._player, self._noise, self._samples, self._most = player, noise, samples, most
        self._running: Callable[[], None] = _nothing

    def begun(self, number: int, prompts: Sequence[Prompt], saved: Sequence[Mapping[str, Any]] = ()) -> PartialBatch:
        """A batch without a token, or with those that `saved` has."""
        episodes = [PartialEpisode.restored(one) for one in saved]
        return PartialBatch(
            number, prompts, episodes or [PartialEpisode() for _ in range(self._samples * len(prompts))]
        )

    def advance(self, state: State, batches: Iterable[PartialBatch], last: int) -> None:
        """Continue all episodes that have not ended by the state's weights: in batch `last` to their end. What plays
        beside this process is waited for in that batch alone."""
        self.finish()
        due = [(batch, place) for batch in batches for place, one in enumerate(batch.episodes) if one.episode.goes_on]
        now, later = [], []
        for batch, place in due:
            (now if batch.number == last or not self._player.beside else later).append((batch, place))
        self._begin(state, now, last)
        self.finish()
        self._begin(state, later, last)

    def _begin(self, state: State, due: Sequence[tuple[PartialBatch, int]], last: int) -> None:
        if not due:
            return
        step = int(state.step)
        wait = self._player.begin(state, [self._start(batch, place, batch.number == last) for batch, place in due])

        def running() -> None:
            for (batch, place), episode in zip(due, wait(), strict=True):
                batch.episodes[place].add(episode, step)

        self._running = running

    def finish(self) -> None:
        """Wait for what is being sampled."""
        running, self._running = self._running, _nothing
        running()

    def _start(self, batch: PartialBatch, place: int, to_its_end: bool) -> Start:
        row, choice = divmod(place, self._samples)
        one = batch.episodes[place]
        sampling = partial(self._noise, batch.number, row, choice)
        return Start(batch.prompts[row], sampling, one.episode.turns, one.parts, None if to_its_end else self._most)


def _nothing() -> None:
    """A wait for nothing."""
