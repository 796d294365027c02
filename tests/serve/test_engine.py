"""The engine: what it writes is what the full forward pass finds, whatever runs beside it and however it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.nn import Inputs, LongRopeScaling, Rope, Routing
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.request import Finish, Request, Sampling
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.mixtral import Mixtral

VOCAB = 64
TIGHT = Capacity(requests=4, tokens=16, length=60, page_size=4, cache_tokens=72)
"""So few pages that requests are preempted, so few tokens a step that prompts come in chunks."""


def llama(**fields):
    return Llama(**{"vocab": VOCAB, "embed": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 48, **fields})


MODELS = {
    "llama": llama(layers=2),
    "window": llama(layers=2, window=5, qk_norm=True, bias=True, tied=True),
    "gpt2": GPT2(VOCAB, 32, 2, 4, 48, 128),
    "alternating windows": Gemma(VOCAB, 32, 5, 4, 2, 48, 8, window=6, soft_cap=5.0, logit_soft_cap=30.0, unroll=False),
    "latents": DeepSeek(
        VOCAB, 32, layers=2, first_dense=1, heads=4, mlp=48, expert_mlp=16, shared=16, q_latent=16, kv_latent=12,
        nope_dim=6, rope_dim=4, value_dim=8, routing=Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1),
    ),
    "experts": Mixtral(VOCAB, 32, 2, 4, 2, 24, Routing(8, 2), qk_norm=True, head_dim=16),
    "biased experts": GptOss(VOCAB, 32, 2, 4, 2, 24, 8, Routing(4, 2), window=6),
}  # fmt: skip


def made(model, seed, devices=1, **layout):
    """A runtime and parameters, the same for every layout, large enough that no two logits are nearly equal."""
    runtime = Runtime(model, Layout(**layout), devices=jax.devices()[:devices])
    rng = np.random.default_rng(seed)

    def value(leaf):
        return jax.device_put(rng.normal(0, 0.4, leaf.shape).astype(np.float32), leaf.sharding)

    specs = {path: spec for path, spec in runtime.parameters.items()}
    values = jax.tree.map(value, runtime.abstract(specs))
    from axon.runtime import nested

    return runtime, nested(values), runtime.initialise_variables(0)


@pytest.fixture
def small(seed):
    return made(llama(), seed)


def answers(engine, requests):
    """The ids that follow each request, all asked at once; and the last update of each."""
    numbers, ids, last = [engine.submit(request) for request in requests], {}, {}
    while engine.busy:
        for update in engine.step():
            assert update.request not in last
            ids.setdefault(update.request, []).extend(update.ids)
            if update.finish is not None:
                last[update.request] = update
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    assert not stats.running + stats.waiting
    return [ids[number] for number in numbers], [last[number] for number in numbers]


def drawn_requests(rng, count, **sampling):
    """Some of which begin alike, so that they share pages."""
    common = rng.integers(0, VOCAB, 20).tolist()
    found = []
    for number in range(count):
        shared = common[: int(rng.integers(0, 20))] if number % 2 else []
        prompt = [*shared, *rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()]
        found.append(Request(tuple(prompt), Sampling(tokens=int(rng.integers(1, 20)), seed=number, **sampling)))
    return found


def likeliest(runtime, values, variables, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them, without a cache."""
    length = 64

    def forward(values, tokens):
        model = runtime.bind(values, variables)
        places = jnp.arange(length, dtype=jnp.int32)[None]
        hidden, *_ = model.hidden(
            Inputs(tokens, jnp.minimum(places, len(prompt) + len(ids) - 1), jnp.zeros_like(tokens))
        )
        return jnp.argmax(model.output.logits(hidden)[0], axis=-1)

    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt) + len(ids)] = [*prompt, *ids]
    with runtime.tracing():
        found = np.asarray(jax.jit(forward)(values, tokens))
    return found[len(prompt) - 1 : len(prompt) + len(ids) - 1].tolist()


@pytest.mark.few(model=("window", "alternating windows"))
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_the_full_forward_pass_for_every_family(model, seed, rng):
    runtime, values, variables = made(MODELS[model], seed)
    engine = Engine(runtime, values, variables, capacity=TIGHT)
    requests = drawn_requests(rng, 8, temperature=0)
    found, _ = answers(engine, requests)
    for request, ids in zip(requests, found, strict=True):
        assert ids == likeliest(runtime, values, variables, request.prompt, ids)
        assert len(ids) == request.sampling.tokens


@pytest.mark.few(model=("alternating windows",))
@pytest.mark.parametrize("model", MODELS)
def test_a_requests_tokens_are_bit_for_bit_the_same_alone_and_in_a_crowd(model, seed, rng):
    """Log-probabilities are compared, which show each bit of the logits."""
    runtime, values, variables = made(MODELS[model], seed)
    requests = drawn_requests(rng, 10, temperature=0.9, logprobs=2)
    tight = Engine(runtime, values, variables, capacity=TIGHT)
    wide = Engine(
        runtime, values, variables, capacity=dataclasses.replace(TIGHT, tokens=64, cache_tokens=600)
    )
    crowd, alone = told(tight, requests), [told(wide, [request])[0] for request in requests]
    assert crowd == alone


def told(engine, requests):
    """Of each request its tokens with their log-probabilities."""
    numbers, found = [engine.submit(request) for request in requests], {}
    while engine.busy:
        for update in engine.step():
            found.setdefault(update.request, []).extend(update.logprobs)
    return [found[number] for number in numbers]
