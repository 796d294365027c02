"""Episodes that are sampled at once: each by a thread of its own, all by one engine."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from axon.own_code import written_at
from axon.serve.engine import Engine
from axon.serve.offline import AT_ONCE, Answer, answer_of
from axon.serve.replicas import Replicas
from axon.serve.request import Finish, Request, Sampling, Update, check_ids
from axon.tune.environments import Environment
from axon.tune.episodes import Episode, Turn
from axon.tune.playing import EnvironmentProcesses, InThread, Playing
from axon.tune.prompt import Prompt
from axon.tune.rewards import finite
from axon.tune.starts import Start

T = TypeVar("T")
Ask = Callable[[Request], Answer]
Asked = SimpleQueue[tuple[Request, Future[Answer]] | None]
"""Requests with what their threads wait for; None for a thread that is done."""

EPISODES = 2 * AT_ONCE
"""Episodes that run at once, at most: half of them may be with their environment while the engine is full."""


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes of an environment by an engine.

    Args:
        sampling: how an answer is drawn, where a start says nothing else.
        encode: the ids of what the environment says and of what opens the next answer.
        turns: answers in an episode, at most. positions: its tokens, at most, the prompt's included.
        limit: seconds for each call of the environment. report: called with a line where it failed in some episodes.
        processes: which play episodes in place of threads.
    """

    environment: Environment
    sampling: Sampling
    encode: Callable[[str], Sequence[int]]
    turns: int
    positions: int
    limit: float
    report: Callable[[str], None]
    processes: EnvironmentProcesses | None = None

    def __call__(
        self, engine: Engine | Replicas, starts: Sequence[Start], check: Callable[[Answer], Answer]
    ) -> list[Episode]:
        """The episodes, in the order of their starts. What `check` raises of an answer ends all."""
        count = EPISODES if self.processes is None else self.processes.count
        episodes = at_once(engine, [partial(self._play, engine, start) for start in starts], check, count)
        failed = [(start, one.error) for start, one in zip(starts, episodes, strict=True) if one.error is not None]
        if failed:
            start, error = failed[0]
            self.report(
                f"the environment ({written_at(type(self.environment))}) failed in {len(failed)} of {len(episodes)} "
                f"episodes, which are not trained on: after {start.prompt.where}: {type(error).__name__}: {error}"
            )
        return episodes

    def greedy(self, prompt: Prompt) -> Start:
        """An episode in which each token is the most likely one."""
        return Start(prompt, lambda turn: replace(self.sampling, temperature=0.0))

    def longest(self, ids: tuple[int, ...]) -> Request:
        """The longest request that an episode after the prompt `ids` may come to."""
        return Request(ids, replace(self.sampling, tokens=self.positions - len(ids)))

    def close(self) -> None:
        """End the environment's processes, until the next episode."""
        if self.processes is not None:
            self.processes.close()

    def _play(self, engine: Engine | Replicas, start: Start, ask: Ask) -> Episode:
        turns: list[Turn] = []
        try:
            with closing(self._opened()) as playing:
                playing.reset(start.prompt, start.sampling(0).seed)
                ended = self._converse(engine, start, ask, playing.step, turns)
                if ended is None:
                    return Episode(tuple(turns), False, goes_on=True)
                episode = Episode(tuple(turns), ended)
                return replace(episode, reward=finite(playing.reward(episode.as_sampled(start.prompt))))
        except Exception as error:
            return Episode(tuple(turns), False, error=error)

    def _opened(self) -> Playing:
        return InThread(self.environment, self.limit) if self.processes is None else self.processes.open()

    def _converse(
        self,
        engine: Engine | Replicas,
        start: Start,
        ask: Ask,
        step: Callable[[str], Any],
        turns: list[Turn],
    ) -> bool | None:
        """Append the turns of an episode; whether it has ended by itself, None where it goes on later. Turns that it
        has already are given to the environment again."""
        ids = start.prompt.ids
        for number in range(self.turns):
            room = self.positions - len(ids)
            answer = self._answer(engine, start, ask, turns, ids, room)
            turns.append(Turn(answer))
            if start.goes_on(number, answer, room):
                return None
            if answer.finish is not Finish.STOP:
                return False
            if (said := step(answer.text)) is None:
                return True
            start.check_said(number, said)
            said_ids = self._ids(engine, said)
            ids = (*ids, *answer.ids, *said_ids)
            if number + 1 == self.turns or len(ids) + max(self.sampling.min_tokens, 1) > self.positions:
                return False
            turns[-1] = Turn(answer, said, said_ids)
        raise AssertionError("an episode has a turn")

    def _answer(
        self,
        engine: Engine | Replicas,
        start: Start,
        ask: Ask,
        turns: Sequence[Turn],
        ids: tuple[int, ...],
        room: int,
    ) -> Answer:
        """The next answer, of at most `room` tokens after `ids`; so far as it is sampled now."""
        begun = start.begun(len(turns))
        if begun.finish is Finish.STOP or start.left(turns) == 0:
            return begun
        return start.joined(len(turns), ids, ask(start.request(turns, ids, room)), engine.tokenizer)

    def _ids(self, engine: Engine | Replicas, said: Any) -> tuple[int, ...]:
        if not isinstance(said, str):
            raise TypeError(f"step(state, answer) gives {said!r:.80}; must be a text, or None at the end")
        ids = tuple(self.encode(said))
        check_ids(ids, engine.vocab, engine.tokenizer, "what the environment says")
        return ids


def at_once(
    engine: Engine | Replicas, plays: Sequence[Callable[[Ask], T]], check: Callable[[Answer], Answer], count: int
) -> list[T]:
    """What functions return, in their order, that run in threads of their own, `count` at once, and ask the engine,
    which is this thread's: each is given a function that returns the answer to a request. Raises as `Engine.submit`,
    and what `check` raises of an answer."""
    asked: Asked = SimpleQueue()

    def ask(request: Request) -> Answer:
        answer: Future[Answer] = Future()
        asked.put((request, answer))
        return answer.result()

    def run(play: Callable[[Ask], T]) -> T:
        try:
            return play(ask)
        finally:
            asked.put(None)

    with ThreadPoolExecutor(min(len(plays), count)) as pool:
        results = [pool.submit(run, play) for play in plays]
        try:
            _answer(engine, asked, len(plays), check)
        except BaseException:
            _refuse(asked, results)
            raise
    return [result.result() for result in results]


def _answer(engine: Engine | Replicas, asked: Asked, count: int, check: Callable[[Answer], Answer]) -> None:
    """Answer what is asked until so many threads have said that they are done."""
    running: dict[int, tuple[Future[Answer], list[Update]]] = {}
    try:
        while count:
            while count and (not running or not asked.empty()):
                if (item := asked.get()) is None:
                    count -= 1
                else:
                    request, answer = item
                    running[engine.submit(request)] = answer, []
            for update in engine.step():
                if update.request in running:
                    running[update.request][1].append(update)
                    if update.finish is not None:
                        checked = check(answer_of(running[update.request][1]))
                        running.pop(update.request)[0].set_result(checked)
    finally:
        for number, (answer, _) in running.items():
            engine.cancel(number)
            answer.set_exception(CancelledError())


def _refuse(asked: Asked, results: Sequence[Future[Any]]) -> None:
    """Wait until all threads are done, and answer none of them."""
    for result in results:
        result.cancel()
    while not all(result.done() for result in results):
        try:
            item = asked.get(timeout=0.1)
        except Empty:
            continue
        if item is not None:
            item[1].set_exception(CancelledError())
