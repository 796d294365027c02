"""Encoder–decoders, served: what is written is what the full forward pass finds, whatever runs beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import REPEATS, VOCAB, HalfRight, drawn_requests, ids_of, ids_of_any_order, likeliest_of, made

from axon.errors import UserError
from axon.layout import Execution
from axon.nn import CacheSpec
from axon.serve.capacity import Capacity
from axon.serve.draft_model import DraftModel
from axon.serve.encoder_step import padded_lengths
from axon.serve.engine import Engine
from axon.serve.program import ServingProgram
from axon.serve.request import Request, Sampling
from axon.serve.text_model import encoder_inputs
from models.t5 import T5

pytestmark = pytest.mark.usefixtures("caches")

TIGHT = Capacity(requests=4, tokens=16, length=100, page_size=4, cache_tokens=100)
"""So few pages that requests are preempted; texts of two padded lengths."""


def t5(**fields):
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "heads": 4, "head_dim": 8, "mlp": 48}
    return T5(VOCAB, 32, **{**sizes, "buckets": 8, "max_distance": 20, "start_id": 5, **fields})


SCANNED = t5(gated=False, tied=True)
SCAN = Execution(unroll=False)


@pytest.fixture(scope="module", params=["tied and scanned"])
def family(request, shared_seed):
    """A runtime, parameters and variables, and an engine of them, to be left idle."""
    parts = made(SCANNED, shared_seed, execution=SCAN)
    return parts, Engine(*parts, capacity=TIGHT)


def likeliest(parts, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them, without a cache."""
    runtime, values, variables = parts
    read, written = np.zeros((1, TIGHT.length), np.int32), np.zeros((1, TIGHT.length + 1), np.int32)
    read[0, : len(prompt)], written[0, : 1 + len(ids)] = prompt, [5, *ids]

    def logits(values, read, written):
        model, source = runtime.bind(values, variables), encoder_inputs(read, jnp.full(1, len(prompt)))
        inputs = encoder_inputs(written, jnp.full(1, written.shape[1]))
        return model.output.logits(model.decode(inputs, model.encode(source)[0], source.documents)[0])[0]

    with runtime.tracing():
        found = np.asarray(jax.jit(logits)(values, read, written))
    return likeliest_of(found[: len(ids)], ids)


@pytest.mark.full
def test_many_at_once_and_preempted_write_what_the_full_forward_pass_finds(family, rng):
    parts, engine = family
    long = [Request(tuple(rng.integers(0, VOCAB, n).tolist()), Sampling(40, temperature=0)) for n in (64, 65, 100)]
    requests, before = [*long, *drawn_requests(rng, 5, temperature=0)], engine.stats().preemptions
    for request, ids in zip(requests, ids_of(engine, requests), strict=True):
        assert ids == likeliest(parts, request.prompt, ids)
    assert engine.stats().preemptions > before


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_is_drawn_does_not_depend_on_what_runs_beside_it(family, rng):
    _, engine = family
    requests = drawn_requests(rng, 6, temperature=1.0)
    together = ids_of(engine, requests)
    assert together == [ids_of(engine, [request])[0] for request in requests]


def test_guesses_change_no_token(family, rng):
    (runtime, *weights), plain = family
    long = Request(tuple(rng.integers(0, VOCAB, 9).tolist()), Sampling(20, temperature=0))
    requests = [long, *drawn_requests(rng, 6, temperature=0)]
    expected = ids_of(plain, requests)
    guessing = Engine(runtime, *weights, capacity=TIGHT, drafter=HalfRight([[5, *ids] for ids in expected]))
    assert ids_of(guessing, requests) == expected
    stats = guessing.stats()
    assert 0 < stats.accepted < stats.drafted


def test_a_prefix_is_shared_within_one_text_alone(family, rng):
    _, engine = family
    first, second = (tuple(rng.integers(0, VOCAB, 9).tolist()) for _ in range(2))
    for prompt in (first, first, second):
        (ids,) = ids_of(engine, [Request(prompt, Sampling(12, temperature=0, logit_bias={7: 100}))])
        assert ids == [7] * 12
    # As if a request had been preempted with the same answer so far.
    sequences = [engine._runner.sequence(Request(prompt), 0, 20) for prompt in (first, second, (1, *first))]
    for sequence in sequences:
        sequence.tokens += [7] * 8
    assert [engine._scheduler.known(one) for one in sequences] == [8, 8, 0]


@pytest.mark.full
@pytest.mark.draws(1)
def test_after_a_swap_the_text_is_read_by_the_new_weights(family, rng, seed):
    (runtime, *weights), _ = family
    others, engine = made(SCANNED, seed, execution=SCAN), Engine(runtime, *weights, capacity=TIGHT)
    request = Request(tuple(rng.integers(0, VOCAB, 9).tolist()), Sampling(12, temperature=0))
    number, ids = engine.submit(request), []
    while len(ids) < 4:
        ids += [token for update in engine.step() for token in update.ids]
    engine.swap(others[1])
    while engine.busy:
        ids += [token for update in engine.step() for token in update.ids]
    engine.cancel(number)
    swapped = likeliest(others, request.prompt, ids)
    kept = next(place for place in range(4, 13) if swapped[place:] == ids[place:])
    assert kept < 8


def test_after_the_warm_up_nothing_compiles(family, rng):
    (runtime, *weights), _ = family
    engine = Engine(runtime, *weights, capacity=TIGHT)
    engine.warm_up()
    compiled = engine.stats().compiles
    ids_of(engine, [Request((3,) * length, Sampling(4, temperature=0)) for length in (1, 64, 65, 100)])
    assert engine.stats().compiles == compiled


def test_what_is_served_is_compiled_with_the_targets_options(family, monkeypatch):
    ((runtime, *weights), _), asked = family, []
    monkeypatch.setattr(runtime, "compiler_options", {"an_option": "true"})
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, **options: asked.append(options.pop("compiler_options")) or jit(fn))
    Engine(runtime, *weights, capacity=TIGHT)
    assert len(asked) >= 3
    assert all(options["an_option"] == "true" for options in asked)


def test_a_plan_counts_the_text_of_every_slot(family):
    (runtime, *_), _ = family
    program = ServingProgram(runtime, TIGHT)
    assert program.state_bytes() == 2 * TIGHT.requests * (2 * TIGHT.length * 4 * 8 + 1) * 4
    assert program.snapshot_bytes() == 0


def test_a_request_may_read_and_write_as_many_tokens_as_there_are_positions(family, rng):
    _, engine = family
    prompt = tuple(rng.integers(0, VOCAB, TIGHT.length).tolist())
    (ids,) = ids_of(engine, [Request(prompt, Sampling(500, temperature=0))])
    assert len(ids) == TIGHT.length - 1 == engine.room(len(prompt))
    with pytest.raises(UserError, match="the prompt has 101 tokens"):
        engine.submit(Request((*prompt, 0)))
    assert engine.room(len(prompt) + 1) < 1


def test_what_an_encoder_decoder_cannot_do_is_refused_by_name(family):
    (runtime, *weights), engine = family
    with pytest.raises(UserError, match=r"Request\.prompt_logprobs"):
        engine.submit(Request((1, 2), prompt_logprobs=True))
    with pytest.raises(UserError) as error:
        Engine(runtime, *weights, capacity=TIGHT, drafter=DraftModel(runtime, *weights))
    assert all(part in str(error.value) for part in ("DraftModel", "states of sequences"))
    with pytest.raises(UserError, match=r"CacheSpec\.constant"):
        CacheSpec(("pages", "page_size"), (1, 1), cache_kind="pages", constant=True)


def test_a_text_is_padded_to_one_of_a_few_lengths():
    assert [padded_lengths(most) for most in (9, 64, 65, 300)] == [(9,), (64,), (64, 65), (64, 128, 256, 300)]


@pytest.mark.full
@pytest.mark.parametrize("model", [t5(), t5(tied=True, activation="silu"), t5(gated=False, vocab_multiple=48)])
def test_every_kind_writes_what_the_full_forward_pass_finds(model, seed, rng):
    parts, requests = made(model, seed), drawn_requests(rng, 4, temperature=0)
    for request, ids in zip(requests, ids_of(Engine(*parts, capacity=TIGHT), requests), strict=True):
        assert ids == likeliest(parts, request.prompt, ids)


@pytest.mark.full
def test_priorities_cancellations_and_guesses_change_no_token(seed, rng):
    parts = made(t5(), seed)
    engine = Engine(*parts, capacity=TIGHT, drafter=REPEATS)
    for request, found in ids_of_any_order(engine, drawn_requests(rng, 30, temperature=0), rng):
        assert found == likeliest(parts, request.prompt, found)
