"""`TimeLimited`, calls of functions and coroutines that may last only so long."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from queue import Empty, Queue
from threading import Thread
from typing import Any

AT_ONCE = 16
"""Calls of a coroutine that wait beside one another, at most."""


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
        return self._within(self._limit, function, args)

    def each(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        """What the function returns for each argument, or the error that it raises: `AT_ONCE` at a time of a coroutine
        function, each for `limit` seconds; otherwise one after the other."""
        if not is_coroutine_function(function):
            return [self._outcome(function, argument) for argument in arguments]
        rounds = math.ceil(len(arguments) / AT_ONCE)
        try:
            return self._within(self._limit * (rounds + 1), _gathered, (function, arguments, self._limit))
        except Exception as error:
            return [error] * len(arguments)

    def _outcome(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return self(function, argument)
        except Exception as error:
            return error

    def _within(self, limit: float, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        result: Queue[tuple[Any, BaseException | None]] = Queue()
        self._calls.put((limit, function, args, result))
        try:
            value, error = result.get(timeout=limit)
        except Empty:
            self.close()  # once the call is over, if ever it is
            self._begin()
            raise TimeoutError(f"not done after {limit:g} seconds") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(repr(error))
        return value

    def close(self) -> None:
        """End the thread after the call that it is at."""
        self._calls.put(None)

    def _begin(self) -> None:
        self._calls: Queue[Any] = Queue()
        Thread(target=_work, args=(self._calls,), daemon=True).start()


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether it is written `async def`, as a function or as the `__call__` of an object."""
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


async def _gathered(function: Callable[[Any], Awaitable[Any]], arguments: Sequence[Any], limit: float) -> list[Any]:
    free = asyncio.Semaphore(AT_ONCE)

    async def outcome(argument: Any) -> Any:
        async with free:
            try:
                return await asyncio.wait_for(function(argument), limit)
            except TimeoutError:
                return TimeoutError(f"not done after {limit:g} seconds")
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # one that ended the loop would be waited for
                return error if isinstance(error, Exception) else RuntimeError(repr(error))

    return await asyncio.gather(*map(outcome, arguments))


def _work(calls: Queue[Any]) -> None:
    loop = asyncio.Runner()
    while (call := calls.get()) is not None:
        limit, function, args, result = call
        try:
            value = function(*args)
            result.put((loop.run(asyncio.wait_for(value, limit)) if inspect.isawaitable(value) else value, None))
        except BaseException as error:  # one that ended the thread would be waited for
            result.put((None, error))
    loop.close()
