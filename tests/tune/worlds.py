"""Environments that tests name, as a configuration does."""

import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from axon.tune.environments import Role

WORDS = ("alpha beta", "gamma", "delta epsilon", "zeta eta theta", "iota")
"""The prompts of tests."""


@dataclass(frozen=True)
class Counting:
    """Says how many answers there were, `rounds` times; rewards how many tokens the model sampled."""

    rounds: int = 2
    role: Role = "user"

    def reset(self, prompt, seed):
        return {"prompt": prompt.text, "seed": seed, "answers": []}

    def step(self, state, answer):
        state["answers"].append(answer)
        return f"={len(state['answers'])}." if len(state["answers"]) <= self.rounds else None

    def reward(self, state, sampled):
        assert state["prompt"] == sampled.prompt
        assert state["answers"][: len(sampled.turns)] == [*sampled.turns[::2]][: len(state["answers"])]
        return len(sampled.ids)


@dataclass(frozen=True)
class Late(Counting):
    """The same by coroutines, each of which takes a while that nobody knows."""

    async def reset(self, prompt, seed):
        await asyncio.sleep(random.random() / 50)
        return super().reset(prompt, seed)

    async def step(self, state, answer):
        await asyncio.sleep(random.random() / 50)
        return super().step(state, answer)

    async def reward(self, state, sampled):
        return super().reward(state, sampled)


@dataclass(frozen=True)
class Without(Late):
    """The same in a process that has no JAX; each says itself to `folder`, by its number."""

    folder: str = ""

    def reset(self, prompt, seed):
        assert "jax" not in sys.modules
        (Path(self.folder) / str(os.getpid())).touch()
        return super().reset(prompt, seed)


@dataclass(frozen=True)
class Fatal(Counting):
    """The same, but that it kills the process that plays it, once, or whenever one begins an episode."""

    file: str = ""
    once: bool = True

    def reset(self, prompt, seed):
        if self.file and not (self.once and Path(self.file).exists()):
            Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(prompt, seed)


@dataclass(frozen=True)
class Held(Counting):
    """The same, but that it holds the process that plays it, which `file` then names, until that is killed, once."""

    file: str = ""

    def reset(self, prompt, seed):
        if not Path(self.file).exists():
            Path(self.file).write_text(f"{os.getpid()}\n")
            time.sleep(600)
        return super().reset(prompt, seed)


@dataclass(frozen=True)
class Failing(Counting):
    """In half of the episodes, by their seed, fails so: "raise", "hang", "await", "die", "number", "undefined",
    "reset"."""

    how: str = "raise"

    def reset(self, prompt, seed):
        state = super().reset(prompt, seed)
        if self._fails(state) and self.how == "reset":
            raise OSError("no more of these")
        return state

    def step(self, state, answer):
        if not self._fails(state):
            return super().step(state, answer)
        if self.how == "await":
            return asyncio.sleep(30)
        return self._failed(answer)

    def reward(self, state, sampled):
        return float("nan") if self._fails(state) else super().reward(state, sampled)

    def _failed(self, answer):
        match self.how:
            case "raise":
                raise KeyError(answer)
            case "hang":
                time.sleep(30)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "number":
                return 3
        return None

    def _fails(self, state):
        return state["seed"] % 2 == 1


@dataclass(frozen=True)
class Fickle(Counting):
    """The same, but that it never says what it has said."""

    def step(self, state, answer):
        return super().step(state, answer) and str(random.random())


@dataclass(frozen=True)
class Speaker:
    """A game, but for what it lacks."""

    role: str = "narrator"

    def reset(self, prompt):
        return prompt

    def step(self, state, answer):
        return None

    def reward(self, state, sampled):
        return 0
