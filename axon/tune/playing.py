"""Where an environment plays an episode: in a thread of this process, or in a process of its own."""

import asyncio
import inspect
import pickle
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from axon.errors import UserError
from axon.launch.worker import Worker
from axon.own_code import written_at
from axon.tune.environments import Environment
from axon.tune.prompt import Prompt
from axon.tune.rewards import Sampled
from axon.tune.time_limited import TimeLimited


class Playing(Protocol):
    """One episode of an environment, with its state. Each call raises what the environment does, and `TimeoutError`."""

    def reset(self, prompt: Prompt, seed: int) -> None: ...
    def step(self, answer: str) -> Any: ...
    def reward(self, sampled: Sampled) -> Any: ...
    def close(self) -> None: ...


class InThread:
    """An episode in a thread of its own. `limit`: seconds for each call."""

    def __init__(self, environment: Environment, limit: float):
        self._environment, self._call, self._state = environment, TimeLimited(limit), None

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._state = self._call(self._environment.reset, prompt, seed)

    def step(self, answer: str) -> Any:
        return self._call(self._environment.step, self._state, answer)

    def reward(self, sampled: Sampled) -> Any:
        return self._call(self._environment.reward, self._state, sampled)

    def close(self) -> None:
        self._call.close()


@dataclass(frozen=True)
class EnvironmentProcesses:
    """Processes of which each plays one episode of an environment at a time, and is kept for the next.

    Args:
        environment: sent to each. count: how many there are at once, at most, which is the caller's to keep.
        limit: seconds for each call; a process that takes longer is killed, and the next episode has another.
    """

    environment: Environment
    count: int
    limit: float
    _idle: deque[Worker] = field(default_factory=deque, init=False, repr=False, compare=False)

    def open(self) -> "InProcess":
        """An episode in a process that has none, or in a new one."""
        while self._idle:
            if (worker := self._idle.pop()).alive:
                return InProcess(worker, self)
        return InProcess(Worker(partial(Seat, self.environment)), self)

    def keep(self, worker: Worker) -> None:
        """Takes back the process of an episode that is over, unless it has ended."""
        if worker.alive:
            self._idle.append(worker)

    def close(self) -> None:
        """End the processes. Another may be opened afterwards."""
        while self._idle:
            self._idle.pop().close()


@dataclass(frozen=True)
class InProcess:
    """An episode in a process of its own."""

    worker: Worker
    processes: EnvironmentProcesses

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._call("reset", prompt, seed)

    def step(self, answer: str) -> Any:
        return self._call("step", answer)

    def reward(self, sampled: Sampled) -> Any:
        return self._call("reward", sampled)

    def close(self) -> None:
        self.processes.keep(self.worker)

    def _call(self, method: str, *args: Any) -> Any:
        return self.worker.call(method, *args, limit=self.processes.limit)


class Seat:
    """In its process: an environment, and the state and the event loop of the episode that it is at."""

    def __init__(self, environment: Environment):
        self._environment, self._loop, self._state = environment, asyncio.Runner(), None

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._loop.close()
        self._loop = asyncio.Runner()
        self._state = self._done(self._environment.reset(prompt, seed))

    def step(self, answer: str) -> Any:
        return self._done(self._environment.step(self._state, answer))

    def reward(self, sampled: Sampled) -> Any:
        return self._done(self._environment.reward(self._state, sampled))

    def _done(self, said: Any) -> Any:
        return self._loop.run(asyncio.wait_for(said, None)) if inspect.isawaitable(said) else said


def check_portable(environment: Environment, field: str) -> None:
    """Raise `UserError` for an environment that cannot be sent to another process. `field`: its name."""
    place = f"{field} ({written_at(type(environment))})"
    if type(environment).__module__ == "__main__":
        raise UserError(f"{place} is of the script itself, which its own process cannot import: put it in a file")
    try:
        pickle.dumps(environment)
    except Exception as error:  # pickle runs code of whoever wrote the environment
        raise UserError(
            f"{place} cannot be sent to its own process: {type(error).__name__}: {error}. Give it fields that pickle "
            "can write, and open what it cannot, as a connection, in reset"
        ) from None
