"""`/v1/chat/completions`: conversations, tools and formats, streamed as whole."""

import json
from dataclasses import dataclass

import pytest
from fake import FakeChat, FakeEngine, FakeGrammar, tokenizer

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")]


@dataclass
class Cut(FakeChat):
    """Demands this text."""

    text: str

    def grammar(self, tools, many):
        return FakeGrammar(self.text)


@pytest.fixture
def messages(rng) -> list[dict]:
    question = " ".join(rng.choice(["fox", "größer", "漢字"], 5)) + str(rng.integers(10**6))
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]


def joined(events: list[dict], index: int = 0) -> tuple[dict, str]:
    """The message that a stream's deltas make, and why it ended."""
    message: dict = {"role": None, "content": "", "tool_calls": []}
    finish = None
    for choice in [choice for event in events for choice in event["choices"] if choice["index"] == index]:
        assert finish is None, "something came after the end"
        delta, finish = choice["delta"], choice["finish_reason"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        message["tool_calls"] += delta.get("tool_calls", [])
    return message, finish


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"tools": TOOLS}, {"logprobs": True, "top_logprobs": 2}], ids=str)
def test_a_streamed_answer_is_the_whole_one(shared, messages, options):
    body = {"messages": messages, "max_completion_tokens": 30, "seed": 3, **options}
    whole = shared.post(PATH, **body).json()
    events = shared.events(PATH, **body)
    assert whole["object"] == "chat.completion"
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    for choice in whole["choices"]:
        message, finish = joined(events, choice["index"])
        assert message["content"] == choice["message"]["content"]
        assert (message["role"], finish) == ("assistant", choice["finish_reason"])


def test_parts_of_text_are_one_text(shared, messages):
    parts = [{"type": "text", "text": letter} for letter in messages[1]["content"]]
    divided = [messages[0], {**messages[1], "content": parts}]
    one, other = (shared.post(PATH, messages=given, seed=1, max_tokens=20).json() for given in (messages, divided))
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("choice", "called"),
    [("required", ["look", "add"]), ({"type": "function", "function": {"name": "add"}}, ["add"])],
    ids=["required", "named"],
)
def test_a_demanded_tool_is_called_and_the_call_is_no_text(shared, messages, choice, called):
    body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
    whole = shared.post(PATH, **body).json()["choices"][0]
    message, finish = joined(shared.events(PATH, **body))
    for got, reason in ((whole["message"], whole["finish_reason"]), (message, finish)):
        assert (got["content"], reason) == ("I ask:\n", "tool_calls")
        assert [call["function"]["name"] for call in got["tool_calls"]] == called
        assert all(json.loads(call["function"]["arguments"]) == {"k": "ö"} for call in got["tool_calls"])
        assert len({call["id"] for call in got["tool_calls"]}) == len(called)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "positions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_says_so_though_it_has_a_call(serve, messages, limit, stream):
    said = 'call look {"k": 1}\ncall look {"k": 2}'
    ids = tokenizer().encode(said)
    room = {"max_length": 100} if limit == "positions" else {}
    given = {} if limit == "positions" else {limit: len(ids)}
    with serve(FakeEngine(**room), chat=Cut(said * (5 if room else 1))) as running:
        body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required", **given}
        if stream:
            message, finish = joined(running.events(PATH, **body))
        else:
            choice = running.post(PATH, **body).json()["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
    assert message["tool_calls"]
    assert finish == "length"


def test_one_call_is_demanded_where_several_are_not_wanted(shared, messages):
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert len(shared.post(PATH, **body).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_no_tool_is_offered_to_an_answer_that_may_call_none(shared, messages):
    plain, none = (
        shared.post(PATH, messages=messages, seed=1, max_tokens=9, **more).json()["choices"]
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"})
    )
    assert plain == none


def test_an_answer_follows_a_schema(shared, messages):
    schema = {"name": "x", "strict": True, "schema": {"properties": {"größe": {}, "b": {}}}}
    answer = shared.post(PATH, messages=messages, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"größe": "größe", "b": "b"}


def test_log_probabilities_have_the_bytes_of_their_tokens(shared, messages):
    body = shared.post(PATH, messages=messages, logprobs=True, top_logprobs=2, seed=2, max_tokens=40).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 40
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    spelled = bytes(byte for one in content for byte in one["bytes"])
    text = body["choices"][0]["message"]["content"]
    joined = "".join(one["token"] for one in content)
    assert joined == spelled.decode(errors="replace")
    assert joined.rstrip("\ufffd") == text, "the fake engine leaves out a character that is cut at the end"


def test_an_answer_may_be_as_long_as_the_model_has_positions(shared, messages):
    body = shared.post(PATH, messages=messages).json()
    assert body["usage"]["total_tokens"] == 256
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_model_without_a_template_takes_no_conversation(serve, messages):
    with serve(chat=None, grammars=None) as running:
        answer = running.post(PATH, messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert running.client.get("/v1/models").json()["data"][0]["chat"] is False
        answer = running.complete("a", response_format={"type": "json_object"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
