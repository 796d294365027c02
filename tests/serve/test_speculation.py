"""Guesses change no token and no bit, whatever else happens to a request; right ones save steps."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import TIGHT, drawn_requests, made
from scipy.stats import chisquare
from test_engine import llama, log_probabilities

from axon.data.tokenizer import Bpe
from axon.errors import UserError
from axon.serve.draft_model import DraftModel, ModelDrafts
from axon.serve.drafting import LONGEST_REST, REST, DraftController
from axon.serve.engine import Engine
from axon.serve.grammar import Grammars
from axon.serve.request import Finish, Request, Sampling
from axon.serve.speculation import Index, NGram

pytestmark = pytest.mark.usefixtures("caches")

VOCAB = 320
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "é😀中")


@pytest.fixture(scope="module")
def target(shared_seed):
    return made(llama(vocab=VOCAB), shared_seed)


@pytest.fixture(scope="module")
def other(target, shared_seed):
    """A model that often agrees with the target, and sees less."""
    rng = np.random.default_rng([shared_seed, 1])
    values = jax.tree.map(lambda x: x * rng.normal(1, 0.05, x.shape).astype(np.float32), target[1])
    runtime, _, variables = made(llama(vocab=VOCAB, window=9), 0)
    return runtime, values, variables


@pytest.fixture(scope="module")
def tokenizer(shared_seed):
    rng = np.random.default_rng(shared_seed)
    return Bpe(vocab=300).train((" ".join(rng.choice(WORDS, 50)) for _ in range(20)), report=lambda _: None)


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    return Engine(*target, tokenizer=tokenizer, capacity=TIGHT)


@pytest.fixture(scope="module", params=["look-up", "other model", "itself"])
def drafted(request, target, other, tokenizer):
    drafters = {"look-up": NGram(shortest=1), "other model": DraftModel(*other, most=3), "itself": DraftModel(*target)}
    engine = Engine(*target, tokenizer=tokenizer, capacity=TIGHT, drafter=drafters[request.param])
    yield engine
    found = engine.stats()
    assert found.free_pages == found.pages
    if request.param != "look-up":
        drafts = engine._drafting._drafts
        assert isinstance(drafts, ModelDrafts)
        runner = drafts.runner
        assert not runner.scheduler.running + runner.scheduler.waiting
        for pool in runner.pools.values():
            pool.check()
            assert pool.free == pool.count - 1


def answered(engine, requests):
    """Of each request the ids, their log-probabilities, the text, and why it ended."""
    numbers = [engine.submit(request) for request in requests]
    found = {number: ([], [], [], []) for number in numbers}
    while engine.busy:
        for update in engine.step():
            for own, new in zip(found[update.request], (update.ids, update.logprobs), strict=False):
                own += new
            found[update.request][2].append(update.text)
            found[update.request][3].append(update.finish)
    return [(ids, logprobs, "".join(text), ends[-1]) for ids, logprobs, text, ends in found.values()]


def with_sampling(requests, **fields):
    return [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **fields)) for r in requests]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_guesses_change_no_token_and_no_bit(temperature, plain, drafted, rng):
    """With prefixes that are shared, penalties, and preemption, as pages are few."""
    before = drafted.stats()
    requests = drawn_requests(rng, 6, temperature=temperature, logprobs=1, top_k=3)
    few = dict.fromkeys(range(1, 7), 50.0)  # a text of few ids repeats itself
    requests += with_sampling(requests[:4], frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=few, tokens=40)
    requests.append(dataclasses.replace(requests[0], prompt_logprobs=True))
    assert answered(drafted, requests) == answered(plain, requests)
    found = drafted.stats()
    assert found.drafted - before.drafted >= found.accepted - before.accepted > 0
    assert found.preemptions > before.preemptions


@pytest.mark.few(drafted=("other model",))
def test_guesses_go_together_with_grammars_and_stop_texts(plain, drafted, tokenizer, rng):
    grammars = Grammars(tokenizer, vocab=VOCAB)
    requests = drawn_requests(rng, 6, temperature=0.8, logprobs=0, top_k=8)
    texts = [text for _, _, text, _ in answered(plain, requests)]
    stopped = [
        with_sampling([request], stop=(text[len(text) // 2 :][:2],))[0]
        for request, text in zip(requests, texts, strict=True)
        if text
    ]
    ruled = [
        dataclasses.replace(r, grammar=grammars.regex(pattern))
        for r, pattern in zip(requests, (r"(alpha|beta){9}", r"\d{3,9}", r"a{30}", "x.{0,5}y"), strict=False)
    ]
    expected = answered(plain, [*stopped, *ruled])
    assert answered(drafted, [*stopped, *ruled]) == expected
    assert Finish.STOP in {end for *_, end in expected}


def test_a_text_of_a_grammar_without_end_ends_by_its_length(plain, tokenizer, rng):
    grammar = Grammars(tokenizer, vocab=VOCAB).lark('start: "a" start | "bc" other\nother: "d" start')
    (request,) = drawn_requests(rng, 1, temperature=0.8)
    ((ids, _, text, end),) = answered(plain, [dataclasses.replace(request, grammar=grammar)])
    assert (end, len(ids)) == (Finish.LENGTH, request.sampling.tokens)
    assert set(text) <= set("abcd")


@pytest.mark.few(drafted=("other model",))
def test_guesses_are_of_no_consequence_to_a_swap_of_weights(plain, drafted, target, seed, rng):
    """Both go on from the same tokens: what the old weights had drawn when the new ones came depends on the guesses."""
    _, others, _ = made(llama(vocab=VOCAB), seed)
    requests = drawn_requests(rng, 4, temperature=0.8, logprobs=1, top_k=3)
    for request in requests:
        drafted.submit(request)
    for _ in range(4):
        drafted.step()
    drafted.swap(others)
    while drafted.busy:
        drafted.step()
    plain.swap(others)
    assert answered(drafted, requests) == answered(plain, requests)
    for engine in (plain, drafted):
        engine.swap(target[1])


@pytest.mark.few(drafted=("other model",))
def test_a_request_that_is_cancelled_leaves_those_beside_it_alone(plain, drafted, rng):
    requests = drawn_requests(rng, 6, temperature=0.8, logprobs=1, top_k=3)
    expected = answered(plain, requests[3:])
    gone, left = ([drafted.submit(request) for request in some] for some in (requests[:3], requests[3:]))
    found = {number: [] for number in (*gone, *left)}
    while drafted.busy:
        for update in drafted.step():
            found[update.request] += update.logprobs
        if gone and rng.random() < 0.4:
            drafted.cancel(gone.pop())
    assert [found[number] for number in left] == [logprobs for _, logprobs, *_ in expected]


@pytest.mark.full
@pytest.mark.parametrize("drafted", ["other model"], indirect=True)
def test_the_distribution_is_the_models(drafted, target, tokenizer, rng):
    """Pairs of first tokens against the exact softmax: the second of a pair is guessed by another model."""
    prompt, count, likeliest = tuple(rng.integers(0, VOCAB, 5).tolist()), 300, 3
    sampling = Sampling(3, temperature=1, top_k=likeliest)
    seeds = rng.integers(0, 2**63, count).tolist()
    requests = [Request(prompt, dataclasses.replace(sampling, seed=seed)) for seed in seeds]
    before = drafted.stats()
    pairs = [tuple(ids[:2]) for ids, *_ in answered(drafted, requests)]
    assert drafted.stats().drafted - before.drafted >= count / 2
    exact = {}
    for first, share in top(target, prompt, likeliest).items():
        if first in tokenizer.ends:
            exact[(first,)] = share
            continue
        exact |= {(first, second): share * own for second, own in top(target, (*prompt, first), likeliest).items()}
    assert set(pairs) <= exact.keys()
    found = [pairs.count(pair) for pair in exact]
    assert chi_square(np.array(found), np.array(list(exact.values()), float)) > 1e-6


def chi_square(found, shares):
    """How likely it is that counts are as far from these shares; those that are rare count with the most frequent."""
    expected = shares / shares.sum() * found.sum()
    alone = (expected >= 5) & (expected < expected.max())
    found, expected = ([*x[alone], x[~alone].sum()] for x in (found, expected))
    return chisquare(found, expected).pvalue if alone.any() else 1.0


def top(target, ids, count):
    """The likeliest ids that follow, and how likely they are among themselves."""
    runtime, values, variables = target
    last = log_probabilities(runtime, values, variables, list(ids))[-1].astype(float)
    likeliest = np.argsort(last)[::-1][:count]
    shares = np.exp(last[likeliest])
    return dict(zip(likeliest.tolist(), shares / shares.sum(), strict=True))


@pytest.mark.parametrize("drafted", ["itself"], indirect=True)
def test_a_model_that_guesses_for_itself_is_always_right(drafted, tokenizer, rng):
    before = drafted.stats()
    requests = drawn_requests(rng, 4, temperature=0.9, top_p=0.9, presence_penalty=0.3, repetition_penalty=0.7)
    requests += drawn_requests(rng, 4, temperature=1)
    ruled = dataclasses.replace(requests[0], grammar=Grammars(tokenizer, vocab=VOCAB).regex("[a-z ]{40}"))
    answered(drafted, [*requests, ruled])
    found = drafted.stats()
    assert found.accepted - before.accepted == found.drafted - before.drafted > 0


@pytest.mark.parametrize("drafted", ["other model"], indirect=True)
def test_nothing_is_compiled_after_the_warm_up(drafted, rng):
    drafted.warm_up()
    compiled = drafted.stats().compiles
    answered(drafted, with_sampling(drawn_requests(rng, 5), presence_penalty=1.0))
    assert drafted.stats().compiles == compiled


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("drafted", ["look-up"], indirect=True)
def test_right_guesses_save_steps(drafted):
    before, request = drafted.stats(), Request((1, 2, 3), Sampling(42, temperature=0, logit_bias={7: 100.0}))
    answered(drafted, [request])
    found = drafted.stats()
    assert found.steps - before.steps <= 3 + 40 / 5
    assert found.accepted - before.accepted >= 32


def test_a_draft_model_of_another_vocabulary_is_refused(target):
    with pytest.raises(UserError, match=r"the draft model has 64 ids, and the model that it guesses for has 320; give"):
        Engine(*target, capacity=TIGHT, drafter=DraftModel(*made(llama(), 0)))


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match=r"NGram\.shortest is 5; must be at most NGram\.longest, 4"):
        NGram(shortest=5)
    with pytest.raises(UserError, match=r"NGram\.most is 0; must be in \[1, 64\]"):
        NGram(most=0)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_a_look_up_finds_what_followed_the_last_tokens_the_latest_time(tokens, data):
    ngram = NGram(data.draw(st.integers(2, 5)), data.draw(st.integers(1, 2)), 4)
    index, known = None, tokens[:1]
    for token in tokens[1:]:
        known.append(token)
        if data.draw(st.booleans()):
            index = index or Index(known, ngram)
            assert index.propose(ngram.most) == looked_up(known, ngram)


def looked_up(tokens, ngram):
    """By looking everywhere."""
    for size in range(ngram.longest, ngram.shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                place, text = start + size, list(tokens)
                while len(text) < len(tokens) + ngram.most:
                    text.append(text[place + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


def test_a_long_text_takes_bounded_memory_and_recent_tokens_are_found(monkeypatch, rng):
    monkeypatch.setattr("axon.serve.speculation.REMEMBERED", 100)
    tokens = rng.integers(0, 1000, 500).tolist()
    index = Index(tokens, NGram())
    for _ in range(1000):
        tokens.append(int(rng.integers(0, 1000)))
        index.propose(4)
    assert len(index._recent) + len(index._older) <= 2 * 3 * 100 + 6
    tokens += tokens[-80:-77]
    assert index.propose(2) == tokens[-80:-78]


def test_guessing_rests_where_it_is_of_no_use_and_begins_again():
    pace, length, awake = DraftController(), 0, []
    for _ in range(4000):
        length += 1
        awake.append(pace.is_awake(length))
        if awake[-1]:
            pace.verified(0, length)
    assert sum(awake[:60]) > 10
    assert 0 < sum(awake[2000:]) < 80
    while not pace.is_awake(length):
        length += 1
    for _ in range(20):
        length += 3
        assert pace.is_awake(length)
        pace.verified(2, length)
    rests = 0
    while pace.is_awake(length):
        pace.verified(0, length)
    while not pace.is_awake(length + rests):
        rests += 1
    assert rests == REST < LONGEST_REST
