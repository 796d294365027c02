"""`/v1/completions`: what is asked reaches the engine, and what it answers comes whole, streamed or not."""

import json

import pytest
from fake import FakeEngine, tokenizer

from axon.serve.request import Request, Sampling

PATH = "/v1/completions"


def text_of(events: list[dict], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def seen_by(engine: FakeEngine) -> list[Request]:
    """The requests that reach an engine, from now on."""
    seen, submit = [], engine.submit
    engine.submit = lambda request: (seen.append(request), submit(request))[1]
    return seen


@pytest.fixture
def prompt(rng) -> str:
    return " ".join(rng.choice(["fox", "größer", "漢字", "lazy", "😀"], 6)) + str(rng.integers(10**6))


@pytest.fixture
def seeds_asked(shared, monkeypatch):
    """seeds_asked(prompt, **body): those that reach the engine, in the order of the choices."""
    seen, submit = [], shared.service.model.engine.submit
    monkeypatch.setattr(
        shared.service.model.engine, "submit", lambda one: (seen.append(one.sampling.seed), submit(one))[1]
    )

    def ask(prompt, **body):
        seen.clear()
        assert shared.complete(prompt, max_tokens=1, **body).status_code == 200
        return list(seen)

    return ask


@pytest.mark.parametrize(
    "options", [{}, {"n": 3, "seed": 5}, {"echo": True}, {"stop": ["fox", "dog"], "logprobs": 2}], ids=str
)
def test_a_stream_has_the_text_of_the_whole_answer(shared, prompt, options):
    body = {"prompt": prompt, "max_tokens": 40, "seed": 1, **options}
    whole = shared.post(PATH, **body).json()["choices"]
    events = shared.events(PATH, **body)
    assert len(whole) == options.get("n", 1)
    for choice in whole:
        assert text_of(events, choice["index"]) == choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [one for event in events for one in event["choices"][0]["logprobs"][name]] == values
    finishes = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert sorted(filter(None, finishes)) == sorted(choice["finish_reason"] for choice in whole)


def test_every_form_of_a_prompt_is_answered_alike(shared, prompt):
    ids = tokenizer().prompt(prompt)
    texts = [
        [choice["text"] for choice in shared.complete(given, temperature=0).json()["choices"]]
        for given in (prompt, [prompt, prompt], ids, [ids, ids])
    ]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3] == texts[0] * 2


def test_choices_are_of_their_prompts_in_order_and_differ_by_their_seeds(shared, prompt, seed):
    body = shared.complete([prompt, "other"], n=2, seed=seed, max_tokens=30).json()
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] != choices[1]["text"]
    alone = shared.complete(prompt, seed=seed, max_tokens=30).json()["choices"][0]
    assert choices[0]["text"] == alone["text"]
    assert body["usage"]["prompt_tokens"] == len(tokenizer().prompt(prompt)) + len(tokenizer().prompt("other"))
    assert body["usage"]["completion_tokens"] == 120


@pytest.mark.parametrize("given", [{}, {"seed": 5}], ids=["no seed", "a seed"])
def test_equal_prompts_have_noise_of_their_own(seeds_asked, prompt, given):
    texts = {tuple(seeds_asked([prompt] * 4, n=2, **given)) for _ in range(2)}
    assert all(len(set(seeds)) == 8 for seeds in texts)
    assert len(texts) == (1 if given else 2), "with a seed the same again, without other noise"


def test_no_choice_has_the_noise_of_another_seed(seeds_asked, rng):
    first = int(rng.integers(2**63))
    seeds = [key for seed in range(first, first + 4) for key in seeds_asked(["a", "b"], n=4, seed=seed)]
    assert len(set(seeds)) == 4 * 8


def test_what_is_asked_of_sampling_reaches_the_engine(serve, rng):
    asked = {
        "temperature": float(rng.uniform(0.1, 2)),
        "top_p": float(rng.uniform(0.1, 0.9)),
        "top_k": int(rng.integers(1, 50)),
        "min_p": float(rng.uniform(0.1, 0.9)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "seed": int(rng.integers(2**63)),
    }
    with serve() as running:
        seen = seen_by(running.service.model.engine)
        others = {"logit_bias": {"7": 3.5}, "stop": "§", "stop_token_ids": [9], "max_tokens": 3, "logprobs": 4}
        others |= {"min_tokens": 2, "ignore_eos": True}
        assert running.complete("a", **asked, **others).status_code == 200
        assert running.complete("a", seed=-1, max_tokens=1).status_code == 200
    rest = {"logit_bias": {7: 3.5}, "stop": ("§",), "stop_ids": (9,), "tokens": 3, "logprobs": 4}
    rest |= {"min_tokens": 2, "ignore_eos": True}
    assert seen[0].sampling == Sampling(**asked, **rest)
    assert seen[1].sampling == Sampling(tokens=1, temperature=1.0, seed=2**64 - 1)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_a_request_that_does_not_say_is_drawn_as_the_models_defaults_say(serve, path):
    body = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    with serve(defaults={"temperature": 0.25, "top_k": 7, "min_p": 0.125}) as running:
        seen = seen_by(running.service.model.engine)
        for asked in ({"top_p": None}, {"temperature": 1.0, "top_k": 0, "min_p": 0.0}):
            assert running.post(path, **body, **asked, max_tokens=1, seed=3).status_code == 200
    one = Sampling(tokens=1, seed=3, temperature=0.25, top_k=7, min_p=0.125)
    assert [request.sampling for request in seen] == [one, Sampling(tokens=1, seed=3, temperature=1.0)]


def test_the_lower_priority_comes_first_in_the_engines_order(serve):
    with serve(FakeEngine(seconds=0.02, running=1)) as running:
        seen = seen_by(running.service.model.engine)
        for priority in (3, None, -2):
            assert running.complete("a", priority=priority, max_tokens=1).status_code == 200
        chat = [{"role": "user", "content": "a"}]
        assert running.post("/v1/chat/completions", messages=chat, priority=1, max_tokens=1).status_code == 200
        described = running.client.get("/openapi.json").json()["components"]["schemas"]
    assert [request.priority for request in seen] == [-3, 0, 2, -1], "the engine's higher comes first"
    for body in ("CompletionBody", "ChatBody"):
        assert "lower is served earlier" in json.dumps(described[body]["properties"]["priority"])


def test_without_a_seed_no_two_requests_are_alike(shared, prompt):
    texts = {shared.complete(prompt, max_tokens=40).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_as_lm_eval_asks_it(shared, prompt, stream):
    ids = tokenizer().prompt(prompt)
    body = {"prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    if stream:
        parts = [choice for event in shared.events(PATH, **body) for choice in event["choices"]]
    else:
        parts = shared.post(PATH, **body).json()["choices"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    tokens, logprobs, top, offsets = ([x for part in parts for x in part["logprobs"][name]] for name in names)
    assert len(tokens) == len(logprobs) == len(top) == len(offsets) == len(ids) + 1
    assert (logprobs[0], top[0]) == (None, None)
    assert all(value == max(likely.values()) for value, likely in zip(logprobs[1:], top[1:], strict=True))
    assert offsets == [sum(map(len, tokens[:k])) for k in range(len(tokens))]
    text = "".join(part["text"] for part in parts)
    assert text.startswith(tokenizer().decode(ids))


def test_a_prompt_alone_is_scored_with_no_token_after_it(shared, prompt):
    body = shared.complete(prompt, max_tokens=0, echo=True, logprobs=1).json()
    choice = body["choices"][0]
    assert choice["text"] == prompt
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0


def test_the_usage_comes_last_in_a_stream_that_asks_for_it(shared, prompt):
    events = shared.events(PATH, prompt=prompt, max_tokens=5, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    length = len(tokenizer().prompt(prompt))
    assert events[-1]["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 5,
        "total_tokens": length + 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert all("usage" not in event for event in shared.events(PATH, prompt=prompt, max_tokens=5))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ({"type": "json_object"}, "{}"),
        ({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {}}}}}, '{"a": "a"}'),
        ({"type": "regex", "regex": "abc"}, "abc"),
        ({"type": "grammar", "grammar": "start: x"}, "start: x"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_an_answer_has_the_format_that_was_asked(shared, format, text):
    choice = shared.complete("a", max_tokens=50, response_format=format).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_texts_become_ids_and_ids_texts(shared, prompt):
    answer = shared.post("/tokenize", prompt=prompt).json()
    assert answer["tokens"] == tokenizer().prompt(prompt)
    assert answer["count"] == len(answer["tokens"])
    plain = shared.post("/tokenize", prompt=prompt, add_special_tokens=False).json()["tokens"]
    assert shared.post("/detokenize", tokens=plain).json() == {"prompt": prompt}
    chat = shared.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()
    assert chat["tokens"] == tokenizer().prompt("user: a\n")


def test_the_access_log_has_numbers_and_no_prompt(shared, prompt):
    shared.events(PATH, prompt=prompt, max_tokens=7)
    shared.until(lambda: PATH in shared.lines[-1])
    line = json.loads(shared.lines[-1])
    assert (line["method"], line["path"], line["status"], line["generated_tokens"]) == ("POST", PATH, 200, 7)
    assert line["prompt_tokens"] == len(tokenizer().prompt(prompt))
    assert line["finish"] == ["length"]
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert not any(prompt in line for line in shared.lines)
