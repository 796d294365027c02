"""The engine writes what the full forward pass finds, whatever runs beside it, and however it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from random_models import (
    TIGHT,
    VOCAB,
    HalfRight,
    drawn_requests,
    full_forward_pass,
    ids_and_ends,
    ids_of,
    likeliest,
    likeliest_draws,
    made,
    told,
)
from scipy.special import log_softmax

from axon.data.tokenizer import Bpe, Tokenizer
from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.nn import LongRopeScaling, Rope, Routing
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.request import Finish, Request, Sampling
from axon.serve.speculation import NGram
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.mixtral import Mixtral

pytestmark = pytest.mark.usefixtures("caches")


class OneSize(Capacity):
    """All steps are of as many tokens as one may have."""

    def sizes(self):
        return super().sizes()[-1:]


def llama(**fields):
    return Llama(**{"vocab": VOCAB, "embed": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 48, **fields})


MODELS = {
    "llama": llama(layers=2),
    "window": llama(layers=2, window=5, qk_norm=True, bias=True, tied=True),
    "gpt2": GPT2(VOCAB, 32, 2, 4, 48, 128),
    "alternating windows": Gemma(VOCAB, 32, 5, 4, 2, 48, 8, window=6, soft_cap=5.0, logit_soft_cap=30.0),
    "latents": DeepSeek(
        VOCAB, 32, layers=2, first_dense=1, heads=4, mlp=48, expert_mlp=16, shared=16, q_latent=16, kv_latent=12,
        nope_dim=6, rope_dim=4, value_dim=8, routing=Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1),
    ),
    "experts": Mixtral(VOCAB, 32, 2, 4, 2, 24, Routing(8, 2), qk_norm=True, head_dim=16),
    "biased experts": GptOss(VOCAB, 32, 2, 4, 2, 24, 8, Routing(4, 2), window=6),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(shared_seed):
    return made(llama(), shared_seed)


@pytest.fixture(scope="module")
def engine(small):
    """To be left idle, with the weights of `small`."""
    return Engine(*small, capacity=TIGHT)


@pytest.fixture(scope="module", params=MODELS)
def family(request, shared_seed):
    """A runtime, parameters and variables, and an engine of them, to be left idle."""
    parts = made(MODELS[request.param], shared_seed)
    return parts, Engine(*parts, capacity=TIGHT)


def log_probabilities(runtime, values, variables, ids):
    return log_softmax(full_forward_pass(runtime, values, variables, ids), axis=-1)


@pytest.mark.few(family=("alternating windows",))
@pytest.mark.some(family=("gpt2", "latents", "biased experts"))
def test_greedy_tokens_are_those_of_the_full_forward_pass_for_every_family(family, rng):
    (runtime, values, variables), engine = family
    requests = drawn_requests(rng, 8, temperature=0)
    found = ids_of(engine, requests)
    for request, ids in zip(requests, found, strict=True):
        assert ids == likeliest(runtime, values, variables, request.prompt, ids)
        assert len(ids) == request.sampling.tokens


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(family=("latents", "biased experts"))
def test_a_requests_tokens_are_bit_for_bit_the_same_alone_and_in_a_crowd(family, rng):
    """Log-probabilities are compared, which show each bit of the logits."""
    parts, tight = family
    requests = drawn_requests(rng, 10, temperature=0.9, logprobs=2)
    larger = OneSize(**vars(dataclasses.replace(TIGHT, tokens=64, cache_tokens=600)))
    wide = Engine(*parts, capacity=larger)
    crowd, alone = told(tight, requests), [told(wide, [request])[0] for request in requests]
    assert crowd == alone


@pytest.mark.full
def test_text_does_not_depend_on_the_layout(small, engine, shared_seed, rng):
    requests = drawn_requests(rng, 5, temperature=0.7, top_k=20)
    layout = {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()}
    split = Engine(*made(llama(), shared_seed, 4, **layout), capacity=TIGHT)
    for one in (engine, split):
        for request, ids in zip(requests, ids_of(one, requests), strict=True):
            assert ids == likeliest_draws(*small, request, ids)


@pytest.mark.full
@pytest.mark.draws(1)
def test_nothing_is_compiled_after_the_warm_up(small, rng):
    engine = Engine(*small, capacity=TIGHT)
    engine.warm_up()
    compiled = engine.stats().compiles
    requests = drawn_requests(rng, 6, temperature=0.5)
    changed = [dataclasses.replace(r.sampling, presence_penalty=1.0, logit_bias={3: 2.0}, logprobs=2) for r in requests]
    ids_of(engine, [*requests, *(Request(r.prompt, s) for r, s in zip(requests, changed, strict=True))])
    assert engine.stats().compiles == compiled


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_no_token_and_no_bit(temperature, small, engine, rng):
    asked = {"temperature": temperature, "logprobs": 1, "top_k": 3}
    long = Request(tuple(rng.integers(0, VOCAB, 9).tolist()), Sampling(20, seed=9, **asked))
    requests = [long, *drawn_requests(rng, 7, **asked)]
    requests += [Request(r.prompt, dataclasses.replace(r.sampling, frequency_penalty=0.5)) for r in requests[:2]]
    expected = told(engine, requests)
    texts = [[*r.prompt, *(one.token for one in text)] for r, text in zip(requests, expected, strict=True)]
    drafted = Engine(*small, capacity=TIGHT, drafter=HalfRight(texts))
    assert told(drafted, requests) == expected
    assert 0 < drafted.stats().accepted < drafted.stats().drafted


def test_a_prefix_that_is_known_is_not_computed_again_and_changes_nothing(small, engine, rng):
    common = rng.integers(0, VOCAB, 30).tolist()
    requests = [Request((*common, number), Sampling(6, logprobs=1, seed=number)) for number in range(3)]
    first = told(engine, requests[:1])
    before = engine.stats()
    assert told(engine, requests) == first + [told(Engine(*small, capacity=TIGHT), [r])[0] for r in requests[1:]]
    stats = engine.stats()
    assert stats.prefix_hits - before.prefix_hits >= 3 * 28
    assert stats.prompt_tokens - before.prompt_tokens <= 3 * 3


def test_after_a_swap_of_weights_everything_is_of_the_new_ones(small, seed, rng):
    runtime, _, variables = small
    _, others, _ = made(llama(), seed)
    engine, prompt = Engine(*small, capacity=TIGHT), tuple(rng.integers(0, VOCAB, 20).tolist())
    sampling = Sampling(12, temperature=0, logprobs=1)
    ids_of(engine, [Request(prompt, sampling)])
    engine.submit(Request(prompt, sampling))
    ids = [token for _ in range(6) for update in engine.step() for token in update.ids]
    kept = len(ids)
    engine.swap(others)
    while engine.busy:
        ids += [token for update in engine.step() for token in update.ids]
    # A step was in flight, whose token is of the old weights.
    assert ids[kept + 1 :] == likeliest(runtime, others, variables, prompt, ids)[kept + 1 :]
    assert 0 < kept < 11
    assert len(ids) == 12
    fresh = Engine(runtime, others, variables, capacity=TIGHT)
    assert told(engine, [Request(prompt, sampling)]) == told(fresh, [Request(prompt, sampling)])
    with pytest.raises(
        UserError, match=r"other weights: .* is nothing|other weights: .*; give those of the same model"
    ):
        engine.swap({"embedding": {}})


def test_a_cancelled_request_ends_and_the_others_go_on(engine, rng):
    requests = drawn_requests(rng, 4, temperature=0)
    numbers = [engine.submit(request) for request in requests]
    engine.step()
    engine.cancel(numbers[0])
    engine.cancel(numbers[0])
    ends = {}
    while engine.busy:
        for update in engine.step():
            assert update.request not in ends
            if update.finish:
                ends[update.request] = update.finish
    assert ends == {number: Finish.LENGTH if number > numbers[0] else Finish.CANCELLED for number in numbers}
    assert engine.stats().free_pages == engine.stats().pages


def test_who_stops_reading_a_stream_leaves_nothing_behind(engine, rng):
    first, second = drawn_requests(rng, 2, temperature=0)
    number = engine.submit(first)
    for _ in engine.stream(second):
        break
    found = [update for _ in range(99) for update in engine.step()]
    assert {update.request for update in found} == {number}
    assert not engine.busy


def test_stop_ids_end_a_text_and_log_probabilities_are_of_the_distribution_before_temperature(small, rng):
    runtime, values, variables = small
    prompt = tuple(rng.integers(0, VOCAB, 9).tolist())
    engine = Engine(*small, capacity=TIGHT)
    (ids,) = ids_of(engine, [Request(prompt, Sampling(10, temperature=0))])
    stop = Sampling(10, temperature=0, stop_ids=(ids[3],), logprobs=3)
    number, updates = engine.submit(Request(prompt, stop, prompt_logprobs=True)), []
    while engine.busy:
        updates += engine.step()
    assert updates[-1].finish == Finish.STOP
    assert number == updates[-1].request
    found = [one for update in updates for one in update.logprobs]
    assert [one.token for one in found] == ids[: ids.index(ids[3]) + 1]
    expected = log_probabilities(runtime, values, variables, [*prompt, *ids])
    told = [*updates[0].prompt_logprobs, *found]
    for place, one in enumerate(told):
        np.testing.assert_allclose(one.logprob, expected[place, one.token], atol=1e-4)
        np.testing.assert_allclose([p for _, p in one.top], np.sort(expected[place])[::-1][:3], atol=1e-4)
    assert [one.token for one in told[: len(prompt) - 1]] == list(prompt[1:])


@pytest.mark.parametrize("drafter", [None, NGram()])
def test_no_end_is_drawn_among_the_least_tokens(small, rng, drafter):
    prompt = tuple(rng.integers(0, VOCAB, 9).tolist())
    ends = tuple(rng.choice(VOCAB, VOCAB - 4, replace=False).tolist())
    biased = Sampling(12, seed=1, logit_bias=dict.fromkeys(ends, -100.0))
    least = Sampling(20, seed=1, stop_ids=ends, min_tokens=12)
    found, last = ids_and_ends(
        Engine(*small, capacity=TIGHT, drafter=drafter), [Request(prompt, s) for s in (biased, least)]
    )
    assert found[1][:12] == found[0]
    assert not {*found[1][:-1]} & {*ends}
    assert (last[1].finish is Finish.STOP) == (found[1][-1] in ends)


def test_the_tokenizers_ends_are_tokens_as_others_where_they_are_ignored(small, rng):
    prompt = tuple(rng.integers(0, VOCAB, 9).tolist())
    (ids,) = ids_of(Engine(*small, capacity=TIGHT), [Request(prompt, Sampling(10, temperature=0))])
    inner = tokenizers.Tokenizer.from_str(Bpe(vocab=300).train(iter(["a b"]), lambda line: None).to_json())
    engine = Engine(*small, capacity=TIGHT, tokenizer=Tokenizer(inner, 0, frozenset(ids[3:4])))
    plain, ignoring = Sampling(10, temperature=0), Sampling(10, temperature=0, ignore_eos=True)
    found, last = ids_and_ends(engine, [Request(prompt, plain), Request(prompt, ignoring)])
    assert found == [ids[: ids.index(ids[3]) + 1], ids]
    assert [one.finish for one in last] == [Finish.STOP, Finish.LENGTH]
    stopped = dataclasses.replace(ignoring, stop_ids=(ids[5],))
    assert ids_of(engine, [Request(prompt, stopped)]) == [ids[: ids.index(ids[5]) + 1]]


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_text_that_comes_to_long_positions_is_written_as_if_it_had_been_long_from_the_start(seed, rng):
    scaling = LongRopeScaling((1.0,) * 4, (4.0, 3.0, 2.0, 1.5), original=24)
    runtime, values, variables = made(llama(rope=Rope(scaling=scaling)), seed)
    prompt = tuple(rng.integers(0, VOCAB, 15).tolist())
    engine = Engine(runtime, values, variables, capacity=TIGHT)
    short, ids = ids_of(
        engine, [Request(prompt[:3], Sampling(5, temperature=0)), Request(prompt, Sampling(30, temperature=0))]
    )
    assert short == likeliest(runtime, values, variables, prompt[:3], short)
    assert ids[:9] == likeliest(runtime, values, variables, prompt, ids[:9])  # positions to 23
    assert ids[10:] == likeliest(runtime, values, variables, prompt, ids)[10:]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_gives_nearly_the_same_log_probabilities(dtype, small, rng):
    request = Request(tuple(rng.integers(0, VOCAB, 20).tolist()), Sampling(1, temperature=0, logprobs=5))
    quantised = Engine(*small, capacity=dataclasses.replace(TIGHT, cache_dtype=dtype))
    [[found]], [[exact]] = told(quantised, [request]), told(Engine(*small, capacity=TIGHT), [request])
    assert found != exact
    np.testing.assert_allclose(found.top[0][1], exact.top[0][1], atol=0.3)


def test_logits_that_are_no_numbers_end_the_request_and_say_so(small, rng):
    runtime, values, variables = small
    broken = jax.tree.map(lambda x: x * np.nan, values)
    _, (last,) = ids_and_ends(Engine(runtime, broken, variables, capacity=TIGHT), drawn_requests(rng, 1))
    assert (last.finish, last.error) == (
        Finish.FAILED,
        "the model's logits are not numbers here, or its grammar allows no token",
    )


def test_a_prefix_before_what_is_no_number_is_good_for_others(seed, rng):
    runtime, values, variables = made(llama(layers=2), seed)
    table = values["embedding"]["table"]
    values = values | {"embedding": {"table": table.at[VOCAB - 1].set(jnp.nan)}}
    prompt = tuple(rng.integers(0, VOCAB - 1, 13).tolist())
    request, broken = Request(prompt, Sampling(6, temperature=0)), Request((*prompt[:12], VOCAB - 1), Sampling(6))
    engine, alone = (Engine(runtime, values, variables, capacity=TIGHT) for _ in range(2))
    assert ids_and_ends(engine, [broken])[1][0].finish is Finish.FAILED
    assert ids_of(engine, [request]) == ids_of(alone, [request]) != [[]]
    assert engine.stats().prefix_hits == 12


def test_a_cache_that_does_not_fit_the_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("axon.serve.runner.available", lambda placement: 2**20)
    with pytest.raises(
        UserError, match=r"needs [\d.]+ GiB on each device, and there are 0\.00: lower .*--cache-tokens"
    ):
        Engine(*made(MODELS["llama"], 0), capacity=Capacity(length=2**16))


def test_what_cannot_run_is_refused_with_its_reason(engine, small):
    with pytest.raises(UserError, match=r"prompt .*60 tokens.* 60 positions"):
        engine.submit(Request((1,) * 60))
    with pytest.raises(UserError, match=r"id 64.* 0 to 63"):
        engine.submit(Request((1, 64)))
    with pytest.raises(UserError, match=r"Request\.prompt has no tokens"):
        Request(())
    with pytest.raises(UserError, match=r"Capacity.tokens is 4; must be at least Capacity.requests, 64"):
        Capacity(tokens=4)
    with pytest.raises(UserError, match=r"must be one of .*Did you mean 'int8'"):
        Capacity(cache_dtype="int4")
    with pytest.raises(UserError, match=r"Capacity\.length is 200.* 128"):
        Engine(*made(MODELS["gpt2"], 0), capacity=Capacity(length=200))
    with pytest.raises(UserError, match=r"Capacity\.cache_tokens is 59; must be at least .*length, the 60 tokens"):
        Engine(*made(MODELS["llama"], 0), capacity=dataclasses.replace(TIGHT, cache_tokens=59))
    for absurd in [Capacity(length=2**40), Capacity(cache_tokens=2**40), Capacity(length=10**9)]:
        with pytest.raises(
            UserError, match=r"the cache would have [\d,]+ pages .*--length.*--requests, or --cache-tokens"
        ):
            Engine(*made(MODELS["llama"], 0), capacity=absurd)
    with pytest.raises(UserError, match=r"BertModel .*axon\.nn.LanguageModel"):
        Engine(Runtime(Bert(VOCAB, 32, 1, 4, 48, 64), Layout()), {})
