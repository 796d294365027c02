"""Work in the background: its result, its errors, and Ctrl-C."""

import os
import signal
import threading

import pytest

from axon.data.tokenizer import in_background


def test_the_result_and_the_error_are_those_of_the_work():
    assert in_background(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)


def test_the_main_thread_can_be_interrupted_meanwhile():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started, end = threading.Event(), threading.Event()

    def interrupt():
        assert started.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_background(lambda: started.set() or end.wait(60))
    finally:
        end.set()
        signal.signal(signal.SIGINT, before)
