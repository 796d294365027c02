"""The clients that people have: openai's package, lm-eval's API models, and schemathesis over the description."""

import json
import threading

import pytest
from fake import tokenizer

from axon.serve.http.limits import Limits

pytestmark = pytest.mark.extra

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "Where is it?"}]


@pytest.fixture
def client(shared):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)


def test_openai_completes_alone_in_a_crowd_and_streamed(client):
    def ask(prompt: str) -> str:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0).choices[0].text

    prompts = [f"def main{k}(" for k in range(4)]
    alone, crowd = [ask(prompt) for prompt in prompts], {}
    threads = [threading.Thread(target=lambda k=k: crowd.update({k: ask(prompts[k % 4])})) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(crowd[k] == alone[k % 4] for k in range(12))
    events = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=24, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in events) == alone[0]


def test_openai_chats_calls_tools_and_sends_what_they_said(client):
    given = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "tool_calls"
    call = whole.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"k": "ö"})
    with client.chat.completions.stream(**given) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == call.function.arguments
    told = [*ASKED, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "There."}]
    answer = client.chat.completions.create(model="tiny", messages=told, tools=[TOOL], max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_openai_parses_an_answer_into_a_class(client):
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model("Place", city=str, country=str)
    parsed = client.chat.completions.parse(model="tiny", messages=ASKED, response_format=kind).choices[0].message.parsed
    assert (parsed.city, parsed.country) == ("city", "country")


def test_openai_says_what_is_wrong_and_lists_and_counts(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="No model 'other'"):
        client.completions.create(model="other", prompt="a")
    assert [model.id for model in client.models.list().data] == ["tiny"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=5, **options)
    assert last.usage.completion_tokens == 5


def test_openai_embeds_texts_and_ids(client):
    """It asks for base64 unless it is told otherwise, and decodes that."""
    texts = ["the quick brown fox", "a"]
    packed = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    ids = [tokenizer().prompt(text) for text in texts]
    assert [one.embedding for one in client.embeddings.create(model="tiny", input=ids).data] == [
        [float(len(one)), float(one[-1])] for one in ids
    ]
    assert packed.usage.prompt_tokens == sum(map(len, ids))
    assert len(client.embeddings.create(model="tiny", input=ids[0], dimensions=1).data[0].embedding) == 1


@pytest.mark.parametrize("remote", [True, False], ids=["the server's tokenizer", "ids"])
def test_lm_eval_scores_and_generates(shared, tmp_path, remote):
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    backend = "remote" if remote else None
    model = models.LocalCompletionsAPI(
        model="tiny", base_url=f"{shared.url}/v1/completions", tokenizer_backend=backend, max_length=200
    )
    if remote:
        requests = [Instance("loglikelihood", {}, ("the quick", f" brown {word}"), k) for k, word in enumerate("ab")]
        scores = model.loglikelihood(requests)
        assert all(score < 0 and greedy for score, greedy in scores)
    options = {"until": ["\n\n\n"], "max_gen_toks": 9}
    texts = model.generate_until([Instance("generate_until", {}, ("the quick", options), 0)])
    sent = tokenizer().encode("the quick") if remote else "the quick"  # of a text alone, without what opens a prompt
    assert texts[0] == shared.complete(sent, max_tokens=9, temperature=0).json()["choices"][0]["text"]


def test_schemathesis_finds_no_answer_that_the_description_does_not_have(serve):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    generate = [Phase.generate]
    checks = [
        not_a_server_error,
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    ]
    with serve(limits=Limits(tokens=4)) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        for operation in schema.get_all_operations():
            described = operation.ok()
            for mode in list(schemathesis.GenerationMode)[: 2 if described.method == "post" else 1]:

                @settings(max_examples=8, suppress_health_check=list(HealthCheck), phases=generate)
                @given(case=described.as_strategy(generation_mode=mode))
                def check(case):
                    case.call_and_validate(checks=checks)

                check()
        assert running.complete("a").status_code == 200
