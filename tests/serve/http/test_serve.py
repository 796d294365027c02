"""Starting and ending: a port that is taken, SIGTERM with requests that run, and a second one."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake import FakeEngine, served

from axon.errors import UserError
from axon.serve.http.limits import Limits
from axon.serve.http.serve import bound, listen
from axon.serve.http.serve import serve as serve_model

MEMBER = Path(__file__).with_name("member.py")
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 100}


@contextmanager
def process(seconds: float, drain: float):
    """A server of its own, and its URL."""
    command = [sys.executable, str(MEMBER), str(seconds), str(drain)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, running.stdout.readline().removeprefix("serving ").strip()
        finally:
            running.kill()


def ended(running: subprocess.Popen) -> tuple[int, str]:
    _, errors = running.communicate(timeout=20)
    return running.returncode, errors


def stop(running: subprocess.Popen, client: httpx.Client) -> None:
    """Ask it to end, and wait until it has heard that."""
    running.send_signal(signal.SIGTERM)
    while client.get("/health").status_code == 200:
        time.sleep(0.01)
    assert client.get("/health").status_code == 503


@pytest.mark.full
@pytest.mark.draws(1)
def test_sigterm_lets_what_runs_end_refuses_what_is_new_and_exits_0():
    with process(0.02, 30) as (running, url), httpx.Client(base_url=url, timeout=20) as client:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            parts = answer.iter_text()
            next(parts)
            stop(running, client)
            new = client.post("/v1/completions", json=BODY)
            assert (new.status_code, new.json()["error"]["code"]) == (503, "unavailable")
            assert int(new.headers["retry-after"]) > 0
            text = "".join(parts)
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert ended(running) == (0, "")


@pytest.mark.full
def test_a_second_signal_breaks_off_what_runs_and_the_exit_code_says_so():
    with process(0.2, 30) as (running, url), httpx.Client(base_url=url, timeout=20) as client:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            parts = answer.iter_text()
            next(parts)
            stop(running, client)
            running.send_signal(signal.SIGTERM)
            text = "".join(parts)
        assert "The server is shutting down" in text
        assert text.endswith("data: [DONE]\n\n")
        assert ended(running) == (3, "")


def test_the_time_limit_breaks_off_what_runs(serve):
    with serve(FakeEngine(seconds=0.1), Limits(drain_seconds=0.3)) as running:
        with running.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            parts = answer.iter_text()
            next(parts)
            running.server.handle_exit(signal.SIGTERM, None)
            text = "".join(parts)
        assert "The server is shutting down" in text
        assert running.server.broken_off


def test_without_requests_it_ends_at_once(serve):
    with serve(limits=Limits(drain_seconds=1000)) as running:
        running.server.handle_exit(signal.SIGINT, None)
        running.until(lambda: running.server.should_exit, 5)
        assert not running.server.broken_off


def test_a_port_that_is_taken_or_cannot_be_is_one_message():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"Cannot listen on 127\.0\.0\.1:{port}: .*in use.*--port"):
            bound(port=port)
    with pytest.raises(UserError, match=r"Cannot listen on 127\.0\.0\.1:99999"):
        bound(port=99999)
    for host in ("\udcff", "x" * 5000):
        with pytest.raises(UserError, match=r"--host is .*; expected the name or the address of a host"):
            bound(host, 0)
    with pytest.raises(UserError, match=r"Cannot listen on no\.such\.host\.invalid"):
        bound("no.such.host.invalid")


def test_of_two_servers_that_begin_at_one_port_the_first_to_be_ready_has_it():
    with bound(port=0) as one, bound(port=one.getsockname()[1]) as other:
        listen(other)
        with pytest.raises(UserError, match=r"Cannot listen on http://127\.0\.0\.1:\d+: .*in use; another --port"):
            listen(one)


def test_a_model_without_a_tokenizer_is_refused():
    engine = FakeEngine()
    engine.tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match="tiny has no tokenizer"):
        serve_model(served(engine), bound(port=0))


def test_the_thread_ends_with_its_server(serve):
    with serve() as running:
        assert running.complete("a").status_code == 200
    running.until(lambda: not any(thread is running.service.worker._thread for thread in threading.enumerate()))
