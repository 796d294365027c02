"""What is wrong with a request is said in one message, a 4xx, and others are not disturbed."""

import json
import socket

import pytest

from axon.serve.http.schema import ChatBody, CompletionBody

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}

RAW = {
    "nothing": b"",
    "half an object": b"{",
    "a list": b"[]",
    "a text": b'"a"',
    "null": b"null",
    "two objects": b"{}{}",
    "not UTF-8": b"\xff\xfe",
    "UTF-16": '{"model": "tiny", "prompt": "a"}'.encode("utf-16"),
    "half a surrogate pair": rb'{"model": "tiny", "prompt": "\ud800"}',
    "a key twice": b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
    "NaN": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "infinity": b'{"model": "tiny", "prompt": "a", "temperature": -Infinity}',
    "a number beyond float64": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    "5,000 digits": b'{"model": "tiny", "prompt": "a", "temperature": ' + b"9" * 5000 + b"}",
    "500 digits": b'{"model": "tiny", "prompt": "a", "temperature": ' + b"9" * 500 + b"}",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "a deep prompt": b'{"model": "tiny", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a control character": b'{"model": "tiny", "prompt": "\n"}',
}

FIELDS = [
    {"prompt": 3},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", 1]},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [True]},
    {"prompt": "a " * 5000},
    {"prompt": "x" * 100_000},
    {"prompt": ["a"] * 300},
    {"prompt": None},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"max_tokens": 10**30},
    {"temperature": "hot"},
    {"temperature": -0.1},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"min_p": 2},
    {"n": 0},
    {"n": 1000},
    {"best_of": 2},
    {"suffix": "z"},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"seed": "1"},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": ["a"] * 100},
    {"stop_token_ids": [99999]},
    {"stop_token_ids": [-1]},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"ignore_eos": 1},
    {"logprobs": 21},
    {"logprobs": True},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"99999": 1}},
    {"presence_penalty": 3},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1e-38},
    {"echo": 1},
    {"priority": "high"},
    {"priority": 1.5},
    {"priority": True},
    {"priority": 2**31},
    {"stream": "yes"},
    {"stream_options": {"usage": True}},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "never"}}}},
    {"modle": "tiny"},
]
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "look"}}
CHATS = [
    {"messages": []},
    {"messages": "a"},
    {"messages": [{"content": "a"}]},
    {"messages": [{"role": "wizard", "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
    {"messages": [{"role": "tool", "content": "a"}]},
    {"messages": [USER | {"colour": "red"}]},
    {"top_logprobs": 3},
    {"max_tokens": 3, "max_completion_tokens": 3},
    {"tool_choice": "required"},
    {"tools": [TOOL, TOOL]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "lok"}}},
    {"tools": [TOOL], "tool_choice": "perhaps"},
    {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"functions": [{"name": "look"}]},
    {"min_tokens": 2, "response_format": {"type": "json_object"}},
    {"ignore_eos": True, "tools": [TOOL], "tool_choice": "required"},
    {"add_generation_prompt": True, "continue_final_message": True},
    *(
        {name: value}
        for name, value in {
            "store": True,
            "service_tier": "flex",
            "modalities": ["text", "audio"],
            "verbosity": "low",
            "audio": {},
            "reasoning_effort": "high",
            "prediction": {"type": "content"},
            "metadata": {"a": 1},
            "chat_template_kwargs": [],
        }.items()
    ),
]


def name_of(value: dict) -> str:
    return json.dumps(value)[:60]


def refused(answer, status: int = 400) -> dict:
    """The error of an answer, in OpenAI's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 5 < len(body["error"]["message"]) < 600
    assert "Traceback" not in answer.text
    return body["error"]


@pytest.fixture(autouse=True)
def others_are_undisturbed(shared, rng):
    """What is asked after a broken body is answered as before it."""
    prompt = f"fox {rng.integers(10**6)}"
    before = shared.complete(prompt, temperature=0).json()["choices"]
    yield
    assert shared.complete(prompt, temperature=0).json()["choices"] == before
    assert not shared.service.worker.streams


@pytest.mark.parametrize("body", RAW.values(), ids=RAW)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_broken_body_is_refused(shared, path, body):
    refused(shared.client.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("fields", FIELDS, ids=name_of)
def test_a_wrong_field_is_refused_by_its_name(shared, fields):
    error = refused(shared.post(COMPLETIONS, **{"prompt": "a", **fields}))
    (name,) = fields
    assert any(word in error["message"] for word in (name, "prompt", "JSON schema", "choices"))


@pytest.mark.parametrize("fields", CHATS, ids=name_of)
def test_a_wrong_conversation_is_refused(shared, fields):
    refused(shared.post(CHAT, **{"messages": [USER], **fields}))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("fields", [{}, {"input": 3, "prompt": 3, "tokens": "a"}, {"x": 1}], ids=name_of)
def test_the_other_bodies_are_checked_too(shared, path, fields):
    refused(shared.post(path, **fields))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_a_fields_default(shared, path):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    fields = {COMPLETIONS: CompletionBody, CHAT: ChatBody}[path].model_fields
    nulls = {name: None for name, field in fields.items() if not field.is_required() and name != "seed"}
    answers = [shared.post(path, **body, seed=1, **given) for given in ({}, nulls)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


NOTHING = {
    COMPLETIONS: {"best_of": 1, "suffix": "", "top_k": -1, "min_tokens": 0, "ignore_eos": False},
    CHAT: {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "audio": None,
           "verbosity": "medium", "safety_identifier": "a", "prompt_cache_key": "b", "chat_template_kwargs": {}},
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_asks_for_nothing_is_taken(shared, path):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    plain, given = (shared.post(path, **body, seed=1, **more).json()["choices"] for more in ({}, NOTHING[path]))
    assert plain == given


def test_a_name_close_to_another_is_suggested(shared):
    assert "Did you mean 'max_tokens'?" in refused(shared.complete("a", max_token=3))["message"]
    answer = shared.client.post(COMPLETIONS, json={"model": "tinny", "prompt": "a"})
    error = refused(answer, 404)
    assert error["code"] == "model_not_found"
    assert "Did you mean 'tiny'?" in error["message"]


def test_a_model_is_described_by_its_name(shared):
    (listed,) = shared.client.get("/v1/models").json()["data"]
    assert shared.client.get(f"/v1/models/{listed['id']}").json() == listed
    assert refused(shared.client.get("/v1/models/tinny"), 404)["code"] == "model_not_found"


def test_what_is_not_here_is_refused_in_the_same_form(shared):
    refused(shared.client.get("/etc/passwd"), 404)
    refused(shared.client.get("/v1/models/../../x"), 404)
    refused(shared.client.get(COMPLETIONS), 405)
    refused(shared.client.delete("/v1/models"), 405)
    refused(shared.client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}), 415)


def exchange(url: str, sent: bytes) -> bytes:
    """What a server answers to raw bytes, until it closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_path_upward_and_bytes_that_are_no_http_are_refused(shared):
    close = b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert exchange(shared.url, b"GET /../../etc/passwd" + close).startswith(b"HTTP/1.1 404")
    assert exchange(shared.url, b"GET /%2e%2e/%2e%2e/etc/passwd" + close).startswith(b"HTTP/1.1 404")
    assert exchange(shared.url, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
