"""Interrupts, tried on real processes with real signals."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from axon.launch.signals import Interrupted, Interrupts, compile_interruptibly

HEAD = """
import ctypes, signal, sys, threading, time
from axon.launch import signals
from axon.launch.signals import Interrupted, Interrupts, compile_interruptibly, exit_at_once
def stuck_in_cpp():  # as in a long device computation: Python's own handlers do not run there
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
def say_when_asked(interrupts):
    while not interrupts.requested:
        time.sleep(0.01)
    print("saving", flush=True)
"""

LOOP = """
with Interrupts() as interrupts:
    print("ready", flush=True)
    say_when_asked(interrupts)
    time.sleep(float(sys.argv[1]))
    print("saved", flush=True)
sys.exit(interrupts.exit_code)
"""

BLOCKED = """
with Interrupts() as interrupts:
    threading.Thread(target=say_when_asked, args=(interrupts,), daemon=True).start()
    print("ready", flush=True)
    stuck_in_cpp()
"""

OTHER_LOOP = """
with Interrupts() as interrupts:
    signal.set_wakeup_fd(-1)  # as an event loop on the main thread does
    print("ready", flush=True)
    say_when_asked(interrupts)
    time.sleep(60)
"""

COMPILING = """
with Interrupts() as interrupts:
    print("ready", flush=True)
    try:
        compile_interruptibly(stuck_in_cpp, interrupts)
    except Interrupted as stop:
        print(f"stopped by {stop.signal}", flush=True)
        exit_at_once(stop.exit_code)
"""


def started(script: str, *args: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def signal_twice(process: subprocess.Popen, first: int, second: int) -> None:
    """The second once the first has been taken, and later than what would be the first delivered again."""
    process.send_signal(first)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.2 + random.random() / 5)
    process.send_signal(second)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_run_save_and_stop(number):
    process = started(LOOP, "0.2")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == "saving\nsaved\n"
    assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number):
    process = started(LOOP, "60")
    signal_twice(process, signal.SIGTERM, number)
    out, err = process.communicate(timeout=30)
    assert out == ""
    assert "again: stopping at once" in err
    assert len(err.strip().splitlines()) == 1
    assert process.returncode == 128 + number


def test_a_second_signal_works_while_the_main_thread_is_inside_cpp():
    process = started(BLOCKED)
    time.sleep(0.2)
    signal_twice(process, signal.SIGINT, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "again: stopping at once" in err
    assert process.returncode == 130


def test_a_second_signal_works_while_another_event_loop_holds_the_wake_up_pipe():
    process = started(OTHER_LOOP)
    signal_twice(process, signal.SIGTERM, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_the_same_wish_delivered_twice_counts_once():
    process = started("signals.DUPLICATE_SIGNAL_WINDOW = 20.0" + LOOP, "0.5")  # as one has to wait on a busy machine
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "saving\nsaved\n"
    assert process.returncode == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_compilation_can_be_interrupted(number):
    process = started(COMPILING)
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)  # the compilation never ends
    assert out == f"stopped by {int(number)}\n", err
    assert process.returncode == 128 + number


def test_handlers_are_restored():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        assert interrupts.exit_code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        while not interrupts.requested:
            time.sleep(0.001)
        assert interrupts.exit_code == 143
        with pytest.raises(Interrupted, match="SIGTERM"):
            interrupts.check()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == wakeup
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_outside_of_the_main_thread_the_context_does_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with Interrupts() as interrupts:
            seen.append((interrupts.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_what_is_compiled_comes_back():
    value = random.random()
    with Interrupts() as interrupts:
        assert compile_interruptibly(lambda: value, interrupts) == value


def test_an_error_of_the_compiler_is_raised_in_the_calling_thread():
    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with Interrupts() as interrupts, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_interruptibly(fail, interrupts)
