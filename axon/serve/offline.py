"""What follows many prompts that are known beforehand."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.replicas import Replicas
from axon.serve.request import Finish, Request, TokenLogprob, Update
from axon.serve.text_model import TextModel, check_request, positions

AHEAD = 1024
"""Requests that an engine has at once, at most: those that it runs, and those that wait."""

AT_ONCE = 64
"""Requests that run at once, at most."""

LENGTH_STEP = 128
"""A request has room for a multiple of so many tokens, so that lengths share compiled programs."""


@dataclass(frozen=True)
class Answer:
    """The text that followed a prompt: see `axon.serve.request.Update`."""

    ids: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


def answers(engine: Engine | Replicas, requests: Iterable[Request]) -> Iterator[Answer]:
    """The answer to each request, in their order: each as soon as it and those before it are done.

    The engine is asked by no one else meanwhile. Requests that are not done are cancelled where the reader leaves.
    Raises as `Engine.submit`.
    """
    asked, order = iter(requests), deque[int]()
    told: dict[int, list[Update]] = {}
    running: set[int] = set()
    try:
        while True:
            for request in islice(asked, AHEAD - len(running)):
                order.append(engine.submit(request))
                told[order[-1]] = []
                running.add(order[-1])
            if not order:
                return
            for update in engine.step():
                if update.request in told:
                    told[update.request].append(update)
                    running -= {update.request} if update.finish else set()
            while order and order[0] not in running:
                yield answer_of(told.pop(order.popleft()))
    finally:
        for number in running:
            engine.cancel(number)


def write(
    runtime: Runtime, parameters: Any, variables: Any, tokenizer: Tokenizer | None, requests: Sequence[Request]
) -> Iterator[Answer]:
    """The answers of any model that writes text, as of `answers`: by an engine that is as large as they need.

    Raises as `check_request` before anything runs.
    """
    for request in requests:
        check_request(runtime.module, request, tokenizer)
    capacity = capacity_for(runtime.module, requests)
    return answers(Engine(runtime, parameters, variables, tokenizer=tokenizer, capacity=capacity), requests)


def capacity_for(model: TextModel, requests: Sequence[Request]) -> Capacity:
    """The capacity of an engine for these requests alone."""
    longest = max(positions(model, request) for request in requests)
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    return Capacity(requests=min(len(requests), AT_ONCE), length=min(length, model.max_length or length))


def answer_of(updates: Sequence[Update]) -> Answer:
    """The answer that all updates of a request make."""
    last = updates[-1]
    assert last.finish is not None
    return Answer(
        ids=tuple(token for update in updates for token in update.ids),
        text="".join(update.text for update in updates),
        finish=last.finish,
        logprobs=tuple(one for update in updates for one in update.logprobs),
        error=last.error,
    )
