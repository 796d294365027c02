"""The thread that owns an engine: requests come to it by a queue, and updates go back to the event loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from axon.errors import UserError
from axon.serve.embedder import Embedder
from axon.serve.http.errors import ApiError, overloaded, unavailable
from axon.serve.http.limits import Limits
from axon.serve.http.model import AnyEngine
from axon.serve.request import Request, Update

logger = logging.getLogger(__name__)
Embeddings = asyncio.Future[Sequence[np.ndarray]]
FAILED = "The engine has failed and serves no more; the server's log says why"


class UpdateStream:
    """The updates of requests that were asked together, each with its request's place among them.

    All methods belong to the event loop. Who opens one closes it: what still runs of it is cancelled then.
    """

    def __init__(self, count: int, unread: int, close: Callable[["UpdateStream"], None]):
        self.count, self._open, self._unread, self._close = count, count, unread, close
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._error: ApiError | None = None
        self._changed = asyncio.Event()
        self.closed = False

    @property
    def ended(self) -> bool:
        """Whether every request has had its last update."""
        return not self._open

    async def next(self) -> tuple[int, Update] | None:
        """The next update; None after the last of every request. Raises `ApiError` if they cannot go on."""
        while self._updates.empty():
            if self._error:
                raise self._error
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._updates.get_nowait()

    def add(self, place: int, update: Update) -> None:
        """Called by the worker. A reader that has left too much unread has its requests broken off."""
        if self.closed:
            return
        self._updates.put_nowait((place, update))
        self._open -= update.finish is not None
        self._changed.set()
        if self._updates.qsize() > self._unread:
            self.fail(ApiError(408, f"{self._unread:,} updates of this answer were left unread: read faster"))

    def fail(self, error: ApiError) -> None:
        """End it with an error after what was read so far, unless it has ended."""
        if not self.closed and not self.ended:
            self._error = error
            self._changed.set()
            self.close()

    def close(self) -> None:
        """Cancel what still runs. What came may still be read."""
        if not self.closed:
            self.closed = True
            self._close(self)


class Worker:
    """Runs an engine in a thread of its own.

    Attributes:
        streams: those open. stats: the engine's, after its last step. draining: whether new requests are refused.
        failed: whether the engine has raised something; no request is served then.

    `watch` is called in the event loop with the updates of each step. While there are texts for `embedder`, a batch of
    them goes between two steps.
    """

    def __init__(
        self,
        engine: AnyEngine,
        limits: Limits,
        watch: Callable[[Sequence[Update]], None] = lambda _: None,
        embedder: Embedder | None = None,
    ):
        self.embedder = embedder
        self.engine, self.limits, self.stats, self._watch = engine, limits, engine.stats(), watch
        self.streams: set[UpdateStream] = set()
        self.draining = self.failed = self._stopped = False
        self._calls: set[asyncio.Future[None]] = set()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._embeddings: dict[Embeddings, int] = {}
        """What is not embedded yet, and of how many texts."""
        self._asked: dict[int, Embeddings] = {}
        """Of the thread alone: number of texts → what they become."""
        self._owners: dict[int, tuple[UpdateStream, int]] = {}
        """Of the thread alone: request's number → its stream, and its place there."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self.streams or self._embeddings)

    def join(self, seconds: float) -> None:
        """Wait for the thread's end, after `stop`: for at most so long."""
        self._thread.join(seconds)

    # In the event loop

    def start(self) -> None:
        """To be called in the event loop that everything else is called in."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step; what still runs fails."""
        self._fail_all("The server is shutting down")
        self._stopped = True
        self._commands.put(lambda: None)

    def open(self, requests: Sequence[Request]) -> UpdateStream:
        """Submit requests together. Raises `ApiError` if they cannot be taken now."""
        self.check(len(requests))
        stream = UpdateStream(len(requests), self.limits.unread * len(requests), self._close)
        self.streams.add(stream)
        self._commands.put(partial(self._submit, requests, stream))
        return stream

    def embed(self, texts: Sequence[Sequence[int]]) -> Awaitable[Sequence[np.ndarray]]:
        """The embeddings of some texts' ids; nothing, if whoever awaits them is cancelled."""
        self.check_texts(len(texts))
        result: Embeddings = self._loop.create_future()
        self._embeddings[result] = len(texts)
        result.add_done_callback(self._embedded)
        self._commands.put(partial(self._submit_texts, texts, result))
        return result

    def call(self, fn: Callable[[], None]) -> Awaitable[None]:
        """Have `fn` called in the thread, between two steps. Awaited it raises the `UserError` that `fn` raises."""
        self.check()
        result: asyncio.Future[None] = self._loop.create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._commands.put(partial(self._call, fn, result))
        return result

    def check(self, choices: int = 0) -> None:
        """Raise `ApiError` if no request for so many choices is taken now."""
        self._check(choices, sum(stream.count for stream in self.streams), self.limits.requests, "choices")

    def check_texts(self, count: int) -> None:
        """Raise `ApiError` if so many texts are not embedded now."""
        self._check(count, sum(self._embeddings.values()), self.limits.texts, "texts")

    def _check(self, count: int, open: int, most: int, what: str) -> None:
        if self.failed:
            raise unavailable(FAILED, 60)
        if self.draining or self._stopped:
            raise unavailable("The server is shutting down")
        if count > most:
            raise ApiError(400, f"{count:,} {what} in one request; at most {most:,} may run at once: split it up")
        if open + count > most:
            raise overloaded(f"{open:,} {what} run or wait, of {most:,} that may; ask again later")

    def _close(self, stream: UpdateStream) -> None:
        self.streams.discard(stream)
        if not stream.ended:
            self._commands.put(partial(self._cancel, stream))

    def _fail_all(self, message: str) -> None:
        for stream in list(self.streams):
            stream.fail(unavailable(message))
        for result in (*self._embeddings, *self._calls):
            _settle(result, unavailable(message))

    def _embedded(self, result: Embeddings) -> None:
        """An embedding is there, or not wanted any more."""
        del self._embeddings[result]
        if result.cancelled():
            self._commands.put(partial(self._cancel_texts, result))

    def _deliver(self, updates: Sequence[tuple[UpdateStream, int, Update]]) -> None:
        self._watch([update for *_, update in updates])
        for stream, place, update in updates:
            stream.add(place, update)

    def _fail(self) -> None:
        self.failed = True
        self._fail_all(FAILED)

    # In the thread

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._drain_commands(wait=not (self.engine.busy or self._asked))
                if self.engine.busy and not self._stopped:
                    self._step()
                if self._asked and not self._stopped:
                    self._embed()
                self.stats = self.engine.stats()
        except Exception:
            logger.exception("the engine has failed")
            self._tell(self._fail)

    def _drain_commands(self, wait: bool) -> None:
        """Do what was asked so far; `wait` for something first."""
        try:
            while True:
                self._commands.get(wait)()
                wait = False
        except queue.Empty:
            return

    def _step(self) -> None:
        owned = []
        for update in self.engine.step():
            if owner := self._owners.get(update.request):
                owned.append((*owner, update))
                if update.finish is not None:
                    del self._owners[update.request]
        if owned:
            self._tell(self._deliver, owned)

    def _submit(self, requests: Sequence[Request], stream: UpdateStream) -> None:
        try:
            for place, request in enumerate(requests):
                self._owners[self.engine.submit(request)] = stream, place
        except UserError as error:
            self._tell(stream.fail, ApiError(400, str(error)))

    def _call(self, fn: Callable[[], None], result: asyncio.Future[None]) -> None:
        try:
            fn()
            self._tell(_settle, result, None)
        except UserError as error:
            self._tell(_settle, result, error)

    def _cancel(self, stream: UpdateStream) -> None:
        for number in [number for number, (owner, _) in self._owners.items() if owner is stream]:
            del self._owners[number]
            self.engine.cancel(number)

    def _submit_texts(self, texts: Sequence[Sequence[int]], result: Embeddings) -> None:
        assert self.embedder is not None, "a model that embeds"
        try:
            self._asked[self.embedder.submit(texts)] = result
        except UserError as error:
            self._tell(_settle, result, error)

    def _embed(self) -> None:
        assert self.embedder is not None, "a model that embeds"
        for number, found in self.embedder.step().items():
            self._tell(_settle, self._asked.pop(number), found)

    def _cancel_texts(self, result: Embeddings) -> None:
        assert self.embedder is not None, "a model that embeds"
        for number in [number for number, owner in self._asked.items() if owner is result]:
            del self._asked[number]
            self.embedder.cancel(number)

    def _tell(self, fn: Callable[..., None], *arguments: object) -> None:
        """Call `fn` in the event loop, if it still runs."""
        try:
            self._loop.call_soon_threadsafe(fn, *arguments)
        except RuntimeError:
            self._stopped = True


def _settle(result: asyncio.Future[Any], value: Any) -> None:
    if not result.done():
        result.set_exception(value) if isinstance(value, Exception) else result.set_result(value)
