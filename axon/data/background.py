"""Long calls into compiled code that Ctrl-C can still interrupt."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> T:
    """`work()`, run by a thread: Python handles signals while the main thread waits, but not inside a call into Rust.

    Raises what `work` raises, or `KeyboardInterrupt`; then the thread goes on, and ends with the process.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    while not wait([future], timeout=1).done:  # a signal that another thread is given does not end a wait of this one
        pass
    return future.result()
