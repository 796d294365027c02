"""Environments: what a model's answers act on, and what speaks between them, as a tool, a game or a person."""

import ast
import inspect
import operator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from axon.errors import UserError
from axon.own_code import written_at
from axon.tune.prompt import Prompt
from axon.tune.rewards import ExactMatch, Sampled

Role = Literal["tool", "user"]

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@runtime_checkable
class Environment(Protocol):
    """The other side of an episode: a prompt, and the answers of the model to it and to what the environment says.

    Each of the three is a function or a coroutine. All of an episode are called in one thread, and in one event loop,
    which are its own; episodes run beside one another, so that they share nothing that changes. For a run that
    continues bit for bit they depend on their arguments alone.
    """

    @property
    def role(self) -> Role:
        """Who speaks to the chat template; where prompts are plain documents, texts follow as they are."""
        ...

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """The state of a new episode, an object of any kind that `step` may change. `seed`: of its own noise."""
        ...

    def step(self, state: Any, answer: str) -> Any:
        """What the environment says to an answer: a text, after which the model answers again, or None at the end."""
        ...

    def reward(self, state: Any, sampled: Sampled) -> Any:
        """How good the episode was: a finite number, the higher the better; True is 1."""
        ...


CALLS = {"reset": "reset(prompt, seed)", "step": "step(state, answer)", "reward": "reward(state, sampled)"}
"""The functions of an environment, and how they are called."""


def check_environment(environment: Environment, field: str) -> None:
    """Raise `UserError` for what is no environment, or cannot be called as one. `field`: its name."""
    place = written_at(type(environment))
    if isinstance(environment, type) or not isinstance(environment, Environment):
        raise UserError(
            f"{field} is {environment!r} ({place}), which lacks a member of an environment: expected "
            f"{', '.join(CALLS.values())} and role, as of axon.tune.environments.Environment"
        )
    if environment.role not in ("tool", "user"):
        raise UserError(f"{field} ({place}) has the role {environment.role!r}; must be 'tool' or 'user'")
    for function, call in zip((environment.reset, environment.step, environment.reward), CALLS.values(), strict=True):
        try:
            inspect.signature(function).bind("state", "answer")
        except TypeError as error:
            raise UserError(f"{field} ({place}) cannot be called as {call}: {error}; give it two arguments") from None


@dataclass(frozen=True)
class Calculator:
    """A tool that works out sums and products of whole numbers, as `12*(3+4)=`; an answer without "=" at its end is the
    last one. The reward is that of `ExactMatch`."""

    role: Role = "tool"

    def reset(self, prompt: Prompt, seed: int) -> None:
        return

    def step(self, state: None, answer: str) -> str | None:
        expression = answer.strip()
        return calculated(expression[:-1]) if expression.endswith("=") else None

    def reward(self, state: None, sampled: Sampled) -> float:
        return ExactMatch()(sampled)


LONGEST = 256
"""Characters of an expression, at most: a product has not many more."""


def calculated(expression: str) -> str:
    """What whole numbers with +, − and · between them, and brackets, come to; "error" for anything else."""
    try:
        if len(expression) > LONGEST:
            return "error"
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError("no expression of whole numbers")
