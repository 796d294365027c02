"""Limits: of bodies, tokens, requests and time, and who may ask at all."""

import socket
import threading
import time

import pytest
from fake import FakeEngine

from axon.errors import UserError
from axon.serve.http.limits import Limits, keys_in

COMPLETIONS = "/v1/completions"


def chunks(count: int):
    for _ in range(count):
        yield b" " * 1000


def test_a_body_beyond_the_limit_is_refused_with_and_without_its_length(serve):
    with serve(limits=Limits(body_bytes=2000)) as running:
        assert running.complete("a" * 100).status_code == 200
        assert running.complete("a" * 3000).status_code == 413
        headers = {"content-type": "application/json"}
        assert running.client.post(COMPLETIONS, content=chunks(5), headers=headers).status_code == 413
        assert running.client.post(COMPLETIONS, content=b" " * 2_000_000, headers=headers).status_code == 413
        assert running.complete("a").status_code == 200


@pytest.mark.parametrize("trickles", [False, True], ids=["stops", "trickles"])
def test_a_body_that_never_ends_is_given_up(serve, trickles):
    with serve(limits=Limits(body_seconds=0.3)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            lines = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", "Content-Length: 999"
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            end = time.monotonic() + 0.6
            while trickles and time.monotonic() < end:
                try:
                    connection.sendall(b" ")
                except OSError:
                    break
                time.sleep(0.02)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"did not end within 0.3 seconds" in answer


def test_only_who_has_a_key_may_ask(serve):
    with serve(limits=Limits(keys=("first", "sesame"))) as running:
        client = running.client
        open = [client.get(path).status_code for path in ("/health", "/openapi.json", "/")]
        assert open == [200] * 3
        for path in ("/v1/models", "/metrics", "/state"):
            for header in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
                answer = client.get(path, headers=header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert client.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert running.complete("a").status_code == 401
        running.until(lambda: len(running.lines) > 15)
        assert not any("sesame" in line for line in running.lines)


def test_more_tokens_than_the_limit_are_refused_and_the_default_obeys_it(serve):
    with serve(limits=Limits(tokens=9)) as running:
        assert running.complete("a").json()["usage"]["completion_tokens"] == 9
        assert running.complete("a", max_tokens=10).status_code == 400
        chat = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert chat.json()["usage"]["completion_tokens"] == 9


def test_beyond_the_concurrent_requests_others_have_to_ask_again(serve):
    with serve(FakeEngine(seconds=0.02), Limits(requests=3)) as running:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(running.complete("a", n=1))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = sorted(answer.status_code for answer in answers)
        assert codes[:3] == [200] * 3
        assert codes[-1] == 429
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
        assert running.complete("a", n=4).status_code == 400
        assert running.complete("a", n=3).status_code == 200


def test_who_waits_too_long_for_a_first_token_is_told_so(serve):
    with serve(FakeEngine(seconds=0.02, running=1), Limits(queue_seconds=0.3)) as running:
        slow = threading.Thread(target=lambda: running.complete("a", max_tokens=50))
        slow.start()
        running.until(lambda: running.service.worker.streams)
        answer = running.complete("b", stream=True)
        assert answer.status_code == 429
        assert "0.3 seconds" in answer.json()["error"]["message"]
        slow.join()
        assert running.complete("b").status_code == 200


def test_keys_are_read_from_a_file_one_a_line(tmp_path):
    (file := tmp_path / "keys").write_text("first\n\n  sesame \n")
    assert keys_in(file) == ("first", "sesame")
    file.write_text("\n")
    with pytest.raises(UserError, match="keys has no key"):
        keys_in(file)
    with pytest.raises(UserError, match="absent"):
        keys_in(tmp_path / "absent")


@pytest.mark.parametrize("wrong", [{"keys": ("",)}, {"keys": ("ö",)}, {"body_bytes": 0}, {"queue_seconds": 0}], ids=str)
def test_a_limit_that_cannot_be_is_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Limits(**wrong)
