"""The server with real templates, grammars and readers of calls, in front of an engine that draws what they allow."""

import json

import numpy as np
import pytest
from fake import FakeEngine, FakeGrammar, tokenizer

from axon.serve.chat import Chat
from axon.serve.grammar import Grammars
from axon.serve.http.conversations import Conversations

PATH = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Where is it?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "漢字"]}, "near": {"type": "boolean"}},
    "required": ["city", "near"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("look", "go")]


class Drawing(FakeEngine):
    """SampleParams from what a grammar allows, by the request's seed, and space only where there must be some."""

    def draw(self, request, place):
        if request.grammar is None or isinstance(request.grammar, FakeGrammar):
            return super().draw(request, place)
        grammar = request.grammar.copy()
        assert grammar.accept(self.requests_ids(request)) == place
        bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
        every = np.flatnonzero(bits)
        allowed = [one for one in every if self.tokenizer.decode([one]).strip()] or every
        return int(allowed[np.random.default_rng([request.sampling.seed % 2**32, place]).integers(len(allowed))])

    def requests_ids(self, request):
        return next(ids for one, ids in self.requests.values() if one is request)


@pytest.fixture
def running(serve):
    pytest.importorskip("llguidance")
    grammars = Grammars(tokenizer())
    with serve(
        Drawing(max_length=2000), chat=Conversations(Chat.of(None, tokenizer()), grammars), grammars=grammars
    ) as one:
        yield one


def test_a_demanded_call_has_arguments_of_its_schema_streamed_as_whole(running, seed):
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "seed": seed}
    choice = running.post(PATH, **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    arguments = json.loads(call["arguments"])
    assert call["name"] in ("look", "go")
    assert arguments["city"] in ("Köln", "漢字")
    assert isinstance(arguments["near"], bool)
    deltas = [choice["delta"] for event in running.events(PATH, **body) for choice in event["choices"]]
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed == [call]


def test_an_answer_is_of_its_schema(running, seed):
    wanted = {"type": "json_schema", "json_schema": {"schema": PLACE}}
    body = running.post(PATH, messages=ASKED, response_format=wanted, seed=seed).json()
    assert set(json.loads(body["choices"][0]["message"]["content"])) == {"city", "near"}


def test_a_last_message_is_continued_in_every_route(running):
    body = {"messages": [*ASKED, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    tokens = running.post("/tokenize", **body).json()["tokens"]
    assert tokens == tokenizer().prompt("user: Where is it?\nassistant: It is ")
    assert running.post(PATH, **body, max_tokens=1).json()["usage"]["prompt_tokens"] == len(tokens)
    closed = running.post("/tokenize", messages=ASKED, add_generation_prompt=False).json()["tokens"]
    assert closed == tokenizer().prompt("user: Where is it?\n")
    answer = running.post(PATH, messages=ASKED, chat_template_kwargs={"bos_token": "x"})
    assert (answer.status_code, "'bos_token'" in answer.json()["error"]["message"]) == (400, True)


def test_tools_that_are_nested_too_deeply_are_refused(running):
    deep = '{"a": ' * 1500 + "1" + "}" * 1500
    tools = '[{"type": "function", "function": {"name": "f", "parameters": ' + deep + "}}]"
    body = json.dumps({"model": "tiny", "messages": ASKED})[:-1] + f', "tools": {tools}}}'
    answer = running.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, "nested too deeply" in answer.text) == (400, True)


def test_a_schema_that_nothing_meets_is_refused(running):
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 5, "maxLength": 2}}}
    answer = running.post(PATH, messages=ASKED, response_format=wanted)
    assert answer.status_code == 400
    assert "JSON schema" in answer.json()["error"]["message"]
