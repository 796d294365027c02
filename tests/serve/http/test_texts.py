"""Embeddings over HTTP: texts and ids in OpenAI's form, and what is refused."""

import base64
import threading

import numpy as np
import pytest
from fake import FakeEmbedder, tokenizer

from axon.serve.http.limits import Limits
from axon.serve.http.model import NoEngine

EMBEDDINGS = "/v1/embeddings"


def embedded(ids):
    return [float(len(ids)), float(ids[-1])]


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_embeddings_come_in_order_in_both_forms(shared, form, rng):
    ids = [rng.integers(0, 200, int(rng.integers(1, 20))).tolist() for _ in range(1 if form in ("text", "ids") else 5)]
    texts = [f"the {'lazy ' * int(rng.integers(9))}fox" for _ in ids]
    given = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    read = ids if "ids" in form else [tokenizer().prompt(text) for text in texts]
    body = shared.post(EMBEDDINGS, input=given).json()
    assert [one["embedding"] for one in body["data"]] == [embedded(one) for one in read]
    assert [one["index"] for one in body["data"]] == list(range(len(read)))
    assert body["usage"] == {"prompt_tokens": sum(map(len, read)), "total_tokens": sum(map(len, read))}
    packed = shared.post(EMBEDDINGS, input=given, encoding_format="base64").json()["data"]
    assert [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in packed] == [
        embedded(one) for one in read
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [300]}, "ids are below 300"),
        ({"input": [1] * 101}, "The text has 101 tokens or more; it may have 100"),
        ({"input": "x" * 20_000}, "it may have 100"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions is 0"),
        ({"input": "a", "dimensions": 3}, "dimensions is 3; embeddings have 2, and they may be cut to 1"),
        ({"input": "a", "encoding": "float"}, "Did you mean 'encoding_format'?"),
        ({"input": ["a"] * 3000}, "3,000 texts in one request; at most 2,048"),
    ],
)
def test_a_wrong_body_is_refused_with_what_is_wrong(shared, fields, said):
    answer = shared.post(EMBEDDINGS, **fields)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_an_embedding_is_cut_where_the_model_allows_it(shared):
    assert shared.post(EMBEDDINGS, input=[4, 5], dimensions=1).json()["data"][0]["embedding"] == [2.0]
    assert shared.post(EMBEDDINGS, input=[4, 5], dimensions=2).json()["data"][0]["embedding"] == [2.0, 5.0]


def test_embeddings_that_are_no_numbers_or_break_the_engine_are_answered(serve, caplog):
    with serve() as running:
        answer = running.post(EMBEDDINGS, input=[[1] * 98, [1]])
        assert (answer.status_code, "not numbers" in answer.text) == (503, True)
        assert running.post(EMBEDDINGS, input=[1] * 99).status_code == 503
        assert "no memory is left" in caplog.text
        assert running.client.get("/health").status_code == 503


def test_a_model_without_embeddings_and_one_without_texts_say_so(serve):
    with serve(embedder=None) as running:
        assert "start the server with --embeddings" in running.post(EMBEDDINGS, input="a").json()["error"]["message"]
    with serve(NoEngine(tokenizer(), 100), chat=None, grammars=None) as running:
        assert running.post(EMBEDDINGS, input=[4]).json()["data"][0]["embedding"] == [1.0, 4.0]
        for answer in (running.complete("a"), running.post("/v1/chat/completions", messages=[{"role": "user"}])):
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "tiny embeds texts, and writes none: ask /v1/embeddings"
        about = running.client.get("/v1/models").json()["data"][0]
        assert (about["writes"], about["embeds"], about["chat"]) == (False, True, False)
        assert running.client.get("/state").json()["pages"] == 0
        assert b"axon_pages" in running.client.get("/metrics").content


def test_no_more_texts_wait_than_may(serve):
    with serve(limits=Limits(texts=2), embedder=FakeEmbedder(seconds=0.2)) as running:
        answers: list[int] = []
        ask = lambda: answers.append(running.post(EMBEDDINGS, input=[1]).status_code)  # noqa: E731
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        running.until(lambda: len(running.service.worker._embeddings) == 2)
        refused = running.post(EMBEDDINGS, input=[1])
        assert (refused.status_code, "2 texts run or wait" in refused.text) == (429, True)
        for thread in asking:
            thread.join()
        assert answers == [200, 200]


def test_texts_that_are_not_embedded_in_time_are_forgotten(serve):
    with serve(limits=Limits(queue_seconds=0.1), embedder=FakeEmbedder(seconds=0.3)) as running:
        answer = running.post(EMBEDDINGS, input=[1])
        assert (answer.status_code, "not embedded within 0.1 seconds" in answer.text) == (429, True)
        running.until(lambda: not running.service.worker.busy)
