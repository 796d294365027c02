"""`TimeLimited`, calls of functions and coroutines that may last only so long."""

import asyncio
import inspect
from collections.abc import Callable
from queue import Empty, Queue
from threading import Thread
from typing import Any


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
