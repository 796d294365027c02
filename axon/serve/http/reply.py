"""What comes of a request's choices: gathered into one body, or sent on as server-sent events."""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from axon.serve.http.access import Record
from axon.serve.http.errors import ApiError, overloaded, unavailable
from axon.serve.http.schema import Generation
from axon.serve.http.worker import UpdateStream
from axon.serve.request import Finish, TokenLogprob, Update

T = TypeVar("T")


@dataclass
class Choice:
    """What came of one: of all its updates, or of a single one."""

    text: str = ""
    tokens: int = 0
    cached: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None

    def add(self, update: Update) -> "Choice":
        """Go on by an update, which is also returned alone."""
        self.text += update.text
        self.tokens += len(update.ids)
        self.cached = max(self.cached, update.cached)
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.finish = update.finish
        return replace(
            self,
            text=update.text,
            tokens=len(update.ids),
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
        )


class Reply(ABC):
    """Gathers choices, and says in an endpoint's own form what came.

    Args:
        kind: what its bodies call themselves. prefix: of its number. prompt_tokens: of all prompts.
        count: of choices, `body.n` for each prompt.
    """

    def __init__(self, body: Generation, record: Record, kind: str, prefix: str, count: int, prompt_tokens: int):
        self.body, self.record, self.prompt_tokens = body, record, prompt_tokens
        self.choices = [Choice() for _ in range(count)]
        number, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.head = {"id": number, "object": kind, "created": created, "model": body.model}
        record.prompt_tokens = prompt_tokens

    def take(self, place: int, update: Update) -> Choice:
        """Gather what is new of a choice, and return it. Raises `ApiError` if the choice failed."""
        self.record.generated_tokens += len(update.ids)
        if update.ids:
            self.record.first_token()
        if update.finish is not None:
            self.record.finish.append(update.finish)
        if update.finish in (Finish.FAILED, Finish.CANCELLED):
            raise unavailable(update.error or "The engine gave this request up; ask again")
        return self.choices[place].add(update)

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many choices it has."""
        generated = sum(choice.tokens for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices[:: self.body.n])
        self.record.cached_tokens = cached
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [{"index": place, **self.whole_choice(place)} for place in range(len(self.choices))]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One of a stream."""
        return {**self.head, "choices": choices, **({"usage": usage} if self.with_usage else {})}

    @property
    def with_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @abstractmethod
    def whole_choice(self, place: int) -> dict[str, Any]:
        """A choice that has ended, without its index."""

    @abstractmethod
    def changes(self, place: int, new: Choice) -> Iterable[dict[str, Any]]:
        """What events say of what `take` returned, without the index."""


async def respond(request: Request, stream: UpdateStream, reply: Reply, queue_seconds: float) -> Response:
    """The answer to a request, streamed or not; its choices are cancelled if the client goes."""
    try:
        first = await while_connected(request, _first(stream, queue_seconds))
        parts = _parts(stream, reply, first)
        if reply.body.stream:
            start = await anext(parts)
            return _Events(stream, _events(reply, start, parts))
        await while_connected(request, _exhaust(parts))
    except BaseException:
        stream.close()
        raise
    stream.close()
    return JSONResponse(reply.whole())


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises `ClientDisconnect`, and cancels it, if the client goes first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _first(stream: UpdateStream, seconds: float) -> tuple[int, Update]:
    try:
        async with asyncio.timeout(seconds):
            new = await stream.next()
    except TimeoutError:
        raise overloaded(f"No token came within {seconds:g} seconds: the server is busy") from None
    assert new is not None, "a stream has an update for each of its requests"
    return new


async def _parts(
    stream: UpdateStream, reply: Reply, new: tuple[int, Update] | None
) -> AsyncIterator[tuple[int, Choice]]:
    while new is not None:
        yield new[0], reply.take(*new)
        new = await stream.next()


async def _exhaust(parts: AsyncIterator[object]) -> None:
    async for _ in parts:
        pass


async def _events(
    reply: Reply, start: tuple[int, Choice], parts: AsyncIterator[tuple[int, Choice]]
) -> AsyncIterator[bytes]:
    try:
        yield _changed(reply, *start)
        async for place, new in parts:
            yield _changed(reply, place, new)
        usage = reply.usage()
        if reply.with_usage:
            yield _event(reply.event([], usage))
    except ApiError as error:
        reply.record.error = error.message
        yield _event(error.body())
    yield b"data: [DONE]\n\n"


def _changed(reply: Reply, place: int, new: Choice) -> bytes:
    return b"".join(_event(reply.event([{"index": place, **change}])) for change in reply.changes(place, new))


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class _Events(StreamingResponse):
    """Closes its stream when it ends, however it ends."""

    def __init__(self, stream: UpdateStream, events: AsyncIterator[bytes]):
        super().__init__(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()
