"""The engine's thread: who goes is cancelled, who is slow waits alone, and an engine that breaks says so once."""

import socket
import threading

import httpx
import pytest
from fake import FakeEngine

from axon.serve.http.limits import Limits


def slow_reader(url: str, body: str) -> socket.socket:
    """A connection that has asked, and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_goes_has_its_choices_cancelled(serve, stream, after):
    with serve(FakeEngine(seconds=0.01)) as running:
        engine = running.service.model.engine
        body = f'{{"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 200, "stream": {str(stream).lower()}}}'
        connection = slow_reader(running.url, body)
        running.until(lambda: engine.submitted == 2 and engine.steps > after)
        connection.close()
        running.until(lambda: sorted(engine.cancelled) == [1, 2])
        running.until(lambda: not running.service.worker.streams)
        running.until(lambda: running.lines and '"finish": ["gone"]' in running.lines[-1])
        assert engine.steps < 150


def test_a_slow_reader_is_broken_off_and_holds_up_nobody(serve):
    engine = FakeEngine(max_length=100_000)
    with serve(engine, Limits(unread=50)) as running:
        body = '{"model": "tiny", "prompt": "a", "max_tokens": 99000, "stream": true, "logprobs": 20}'
        connection = slow_reader(running.url, body)
        running.until(lambda: engine.submitted == 1)
        assert running.complete("b", max_tokens=100).status_code == 200
        running.until(lambda: engine.cancelled == [1], 60)
        assert running.complete("b").status_code == 200
        connection.settimeout(20)
        answer = b""
        while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            answer += connection.recv(65536)
        assert b"left unread: read faster" in answer
        connection.close()


def test_many_clients_at_once_have_what_each_has_alone(serve, rng):
    engine = FakeEngine(running=5)
    with serve(engine) as running:
        prompts = [f"fox {number}" for number in rng.integers(10**6, size=40)]
        alone = [running.complete(prompt, temperature=0).json()["choices"] for prompt in prompts]
        found = {}

        def ask(place: int) -> None:
            if place % 4 == 3:  # some leave early
                with httpx.stream("POST", f"{running.url}/v1/completions", json=dict(body, prompt="x", stream=True)):
                    return
            found[place] = running.complete(prompts[place], temperature=0).json()["choices"]

        body = {"model": "tiny", "max_tokens": 100}
        threads = [threading.Thread(target=ask, args=(place,)) for place in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(found[place] == alone[place] for place in found)
        running.until(lambda: not running.service.worker.streams)
        running.until(lambda: not engine.busy)


def test_one_request_that_fails_fails_alone(serve):
    with serve() as running:
        answer = running.complete("FAIL")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "its logits are NaN")
        assert running.complete("a").status_code == 200


def test_an_engine_that_breaks_fails_what_runs_and_is_unhealthy_from_then_on(serve, caplog):
    with serve(FakeEngine(seconds=0.005)) as running:
        url, found = f"{running.url}/v1/completions", []

        def stream() -> None:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 250, "stream": True}
            with httpx.stream("POST", url, json=body) as got:
                found.append("".join(got.iter_text()))

        reader = threading.Thread(target=stream)
        reader.start()
        running.until(lambda: running.service.model.engine.steps > 3)
        answer = running.complete("BREAK")
        reader.join()
        for text in (answer.text, found[0]):
            assert "The engine has failed" in text
            assert "the device is gone" not in text
        assert answer.status_code == 503
        assert running.complete("a").status_code == 503
        assert running.client.get("/health").status_code == 503
        assert running.client.get("/state").json()["status"] == "failed"
        assert "the device is gone" in caplog.text
