"""A model's own multi-token block guesses: what it predicts of the whole text, and no token is another one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import TIGHT, VOCAB, RouterMargins, drawn_requests, likeliest_of, made
from test_engine import MODELS
from test_speculation import answered

from axon.errors import UserError
from axon.nn import Inputs
from axon.serve.engine import Engine
from axon.serve.multi_token import MultiToken, MultiTokenDrafts, following
from axon.serve.program import ServingProgram
from axon.serve.request import Request, Sampling
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence

pytestmark = pytest.mark.usefixtures("caches")

MODEL = dataclasses.replace(MODELS["latents"], layers=1, first_dense=1, multi_token=True)


@pytest.fixture(scope="module")
def model(shared_seed):
    return made(MODEL, shared_seed)


@pytest.fixture(scope="module")
def drafted(model):
    engine = Engine(*model, capacity=TIGHT, drafter=MultiToken())
    yield engine
    found, drafts = engine.stats(), engine._drafting._drafts
    assert found.free_pages == found.pages
    assert isinstance(drafts, MultiTokenDrafts)
    assert not drafts._flights
    assert not drafts._ready


@pytest.mark.full
def test_guesses_change_no_token_and_no_bit(model, drafted, rng):
    """With prefixes that are shared, penalties, scored prompts, and preemption, as pages are few."""
    before = drafted.stats()
    requests = drawn_requests(rng, 6, temperature=0.8, logprobs=1, top_k=3)
    penalised = [dataclasses.replace(one.sampling, frequency_penalty=0.5, tokens=40) for one in requests[:4]]
    requests += [dataclasses.replace(one, sampling=how) for one, how in zip(requests, penalised, strict=False)]
    requests.append(dataclasses.replace(requests[1], prompt_logprobs=True))
    assert answered(drafted, requests) == answered(Engine(*model, capacity=TIGHT), requests)
    found = drafted.stats()
    assert found.drafted > before.drafted
    assert found.preemptions > before.preemptions


def test_a_described_engine_has_the_pages_of_the_block_and_its_programs(model, drafted):
    runtime, *_ = model
    program, drafts = ServingProgram(runtime, TIGHT, multi_token=True), drafted._drafting._drafts
    plain = ServingProgram(runtime, TIGHT)
    own = sum(page.nbytes for page in drafts._cache.values())
    assert program.cache_bytes() == plain.cache_bytes() + own
    size, (width, head) = program.prefill, (MODEL.embed, 4 * MODEL.embed * VOCAB)
    block = sum(4 * spec.size for path, spec in runtime.parameters.items() if path.startswith("mtp/"))
    read = program.read_bytes() - program.cached_bytes(), plain.read_bytes() - plain.cached_bytes()
    assert read[0] - read[1] == block + head
    (logits, cache, hidden), (rows, after), guesses = (
        traced.out_info for traced in (program.traced(size), *program.traced_guess(size))
    )
    assert logits.shape == guesses.shape == (size.rows, VOCAB)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, drafted._runner._cache)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, drafts._cache)
    assert (hidden.shape, rows.shape) == ((1, size.tokens, width), (size.rows, width))


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_guess_is_what_the_block_predicts_of_the_whole_text(model, drafted, rng):
    """Its pages hold what it would compute without them."""
    engine, drafts, seen = drafted, drafted._drafting._drafts, []
    propose = drafts.propose

    def watched(wanted):
        texts = {number: list(stream.sequence.tokens) for number, (stream, _) in wanted.items()}
        found = propose(wanted)
        seen.extend((texts[number], ids[0]) for number, ids in found.items())
        return found

    drafts.propose = watched
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 20))) for _ in range(5)]
    for prompt in prompts:
        engine.submit(Request(tuple(map(int, prompt)), Sampling(tokens=12, temperature=0)))
    while engine.busy:
        engine.step()
    del drafts.propose
    assert len(seen) > 20
    texts, guesses = zip(*seen, strict=True)
    assert likeliest_of(predicted_mtp(*model, texts), guesses) == [*guesses]


def predicted_mtp(runtime, values, variables, texts):
    """The logits of what follows each text, by the block, of all of it at once; no numbers where rounding may choose
    experts."""
    length = max(map(len, texts))

    def forward(values, tokens, length):
        model = runtime.bind(values, variables)
        places = jnp.minimum(jnp.arange(tokens.shape[0]), length - 1)[None]
        inputs = Inputs(tokens[None], places, jnp.zeros_like(places))
        hidden, *_ = model.hidden(inputs)
        x, *_ = model.mtp_hidden(hidden, inputs, jnp.roll(tokens, -1)[None])
        return model.output.logits(x)[0, length - 2]

    compiled, margins, found = runtime.jit(forward), RouterMargins(), []
    for text in texts:
        tokens = np.array(text + [0] * (length - len(text)), np.int32)
        with runtime.tracing(), margins.measured():
            logits = compiled(values, tokens, len(text))
        found.append(np.nan if margins.are_close(len(text)).any() else np.asarray(logits))
    return np.stack([np.broadcast_to(one, VOCAB) for one in found])


@pytest.mark.full
def test_a_block_that_sees_what_the_model_does_is_always_right_and_halves_the_steps(rng, seed):
    """Of one token alone: attention adds nothing, and the block is the model's layer."""
    config = dataclasses.replace(MODEL, first_dense=0)
    runtime, values, variables = made(config, seed)
    table = np.asarray(values["embedding"]["table"])
    values["embedding"]["table"] = jnp.asarray(table / np.sqrt(np.mean(table**2, axis=1, keepdims=True)))
    layer = jax.tree.map(lambda x: x[0], values["layers"]["experts"])
    layer["attention"]["out"] = jnp.zeros_like(layer["attention"]["out"])
    ones, square = jnp.ones(config.embed), jnp.eye(config.embed)
    values["layers"]["experts"] = jax.tree.map(lambda x: x[None], layer)
    values["mtp"] = {
        "block": layer,
        "embedding_norm": {"scale": ones},
        "hidden_norm": {"scale": ones},
        "from_embedding": square,
        "from_hidden": 0 * square,
        "norm": values["norm"],
    }
    request = Request(tuple(rng.integers(0, VOCAB, 5).tolist()), Sampling(tokens=41, seed=seed))
    found = []
    for drafter in (None, MultiToken()):
        engine = Engine(runtime, values, variables, capacity=TIGHT, drafter=drafter)
        found.append((answered(engine, [request]), engine.stats()))
    (plain, slow), (guessed, fast) = found
    assert guessed == plain
    assert fast.drafted == fast.accepted == 20
    assert fast.steps == slow.steps - fast.accepted


def test_a_model_without_the_block_is_refused():
    with pytest.raises(UserError, match="no block that predicts the token after the next"):
        Engine(*made(MODELS["latents"], 0), capacity=TIGHT, drafter=MultiToken())


def test_what_follows_a_token_is_its_sequences_next_one_or_what_is_drawn():
    def part(tokens, start, count, drafts=(), rows=0, draws=False):
        sequence = Sequence(Request(tuple(tokens)), 1, 1)
        return Scheduled(sequence, start, count, drafts, rows, draws, False)

    parts = [part([5, 6, 7, 8], 1, 2), part([9, 10], 1, 3, (11, 12), 3, True), part([1, 2], 0, 2, rows=2, draws=True)]
    tokens = np.array([6, 7, 10, 11, 12, 1, 2, 0, 0], np.int32)
    assert following(parts, tokens)[:7].tolist() == [7, 8, -1, -2, -3, 2, -5]


@pytest.mark.full
def test_nothing_is_compiled_after_the_warm_up(model, rng):
    engine = Engine(*model, capacity=TIGHT, drafter=MultiToken())
    engine.warm_up()
    compiled = engine.stats().compiles
    requests = drawn_requests(rng, 5, temperature=0.8, logprobs=1)
    biased = [dataclasses.replace(one.sampling, logit_bias={3: 1.0}) for one in requests]
    requests += [dataclasses.replace(one, sampling=how) for one, how in zip(requests, biased, strict=True)]
    answered(engine, requests)
    assert engine.stats().drafted
    assert engine.stats().compiles == compiled
