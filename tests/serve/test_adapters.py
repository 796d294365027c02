"""Adapters that are served together: each request is answered as by its own merged model, whatever runs beside it."""

import dataclasses

import jax
import numpy as np
import pytest
from random_models import (
    REPEATS,
    TIGHT,
    VOCAB,
    HalfRight,
    drawn_requests,
    full_forward_pass,
    ids_of,
    likeliest,
    made,
    told,
)

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.nn.multi_lora import MultiLoRA
from axon.runtime import Runtime, flattened, nested
from axon.serve.adapters import Adapter
from axon.serve.engine import Engine
from axon.serve.program import ServingProgram
from axon.serve.request import Request, Sampling
from axon.serve.weights import as_stored
from models.deepseek import DeepSeek
from models.llama import Llama
from models.mixtral import Mixtral

pytestmark = pytest.mark.usefixtures("caches")

LLAMA = Llama(VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)
RANKS = (1, 2, 3, 4)
ROOM = MultiLoRA(sum(RANKS) + 3, np.float32, "*")


def with_room(parts, devices=1, **layout):
    """The runtime, parameters and variables of `parts`, with room for adapters, perhaps on another layout."""
    runtime, values, _ = parts
    room = dataclasses.replace(ROOM, paths=tuple(path for path in runtime.parameters if "/router/" not in path))
    own = Runtime(runtime.model, Layout(**layout), devices=jax.devices()[:devices], transforms=[room])
    places = jax.tree.map(lambda x: x.sharding, own.abstract(nested(own.declared)))
    return own, jax.device_put(jax.tree.map(np.asarray, values), places), own.initialise_variables(0)


def drawn_adapter(runtime, rank, rng, part=1.0):
    """A random adapter of `part` of the weights, so large that it changes what is written."""
    factors = {}
    for path in runtime.operands:
        if rng.random() > part:
            continue
        for factor in ("a", "b"):
            spec = runtime.parameters[f"{path}/{factor}"]
            shape = [rank if axis == "rank" else size for axis, size in zip(spec.axes, spec.shape, strict=True)]
            factors[f"{path}/{factor}"] = rng.normal(0, 0.25, shape).astype(np.float32)
    return Adapter(rank, factors)


def merged(values, adapter):
    """The parameters with W + A·B in the place of W, in float64."""
    flat = flattened(values)
    for path in {one.rpartition("/")[0] for one in adapter.factors}:
        a, b = (adapter.factors[f"{path}/{factor}"].astype(np.float64) for factor in "ab")
        matrices = a.ndim + b.ndim - 2 - flat[path].ndim  # axes that count them
        a, b = a.reshape(*a.shape[:matrices], -1, adapter.rank), b.reshape(*b.shape[:matrices], adapter.rank, -1)
        whole = np.asarray(flat[path]) + (a @ b).reshape(flat[path].shape)
        flat[path] = jax.device_put(whole.astype(np.float32), flat[path].sharding)
    return nested(flat)


@pytest.fixture(scope="module")
def plain():
    return made(LLAMA, np.random.default_rng().integers(2**31))


@pytest.fixture(scope="module")
def room(plain):
    return with_room(plain)


@pytest.fixture(scope="module")
def adapters(room):
    rng = np.random.default_rng()
    return {f"of rank {rank}": drawn_adapter(room[0], rank, rng, part=0.7) for rank in RANKS}


@pytest.fixture(scope="module")
def engine(room, adapters):
    """With all adapters loaded; to be left idle, and so."""
    return loaded(Engine(*room, capacity=TIGHT), adapters)


def loaded(engine, adapters):
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    return engine


def asked(rng, names, count=8, **sampling):
    """Requests of random adapters, or of none, of which some begin alike."""
    requests = drawn_requests(rng, count, temperature=0, **sampling)
    own = [None, *names, *rng.choice([None, *names], count).tolist()][:count]
    return [dataclasses.replace(one, adapter=name) for one, name in zip(requests, own, strict=True)]


def check_merged(plain, adapters, requests, found):
    """Each text is the likeliest by the merged model of its adapter."""
    runtime, values, variables = plain
    for request, ids in zip(requests, found, strict=True):
        own = merged(values, adapters[request.adapter]) if request.adapter else values
        assert ids == likeliest(runtime, own, variables, request.prompt, ids)
        assert len(ids) == request.sampling.tokens


@pytest.mark.full
@pytest.mark.draws(1)
def test_each_request_is_answered_as_by_its_merged_model(plain, adapters, engine, rng):
    """In chunks, with prefixes that others of other adapters have."""
    requests = asked(rng, adapters, 12)
    check_merged(plain, adapters, requests, ids_of(engine, requests))


def test_one_that_was_preempted_goes_on_with_its_adapter(plain, adapters, engine, rng):
    before, ids = engine.stats().preemptions, {}
    prompts = rng.integers(0, VOCAB, (8, 9)).tolist()
    names = [*adapters, *adapters]
    requests = [
        Request(tuple(prompt), Sampling(tokens=12, temperature=0), priority=place // 4, adapter=name)
        for place, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    numbers = [engine.submit(request) for request in requests[:4]]
    for _ in range(6):
        read(engine, ids)
    numbers += [engine.submit(request) for request in requests[4:]]
    while engine.busy:
        read(engine, ids)
    assert engine.stats().preemptions > before
    check_merged(plain, adapters, requests, [ids[number] for number in numbers])


@pytest.mark.full
@pytest.mark.draws(1)
def test_adapters_of_eight_requests_in_one_batch_give_each_the_bits_that_it_gets_alone(room, adapters, engine, rng):
    requests = asked(rng, adapters, 8, logprobs=2)
    wide = dataclasses.replace(TIGHT, requests=8, tokens=64, cache_tokens=600)
    crowd = loaded(Engine(*room, capacity=wide), adapters)
    assert told(crowd, requests) == [told(engine, [request])[0] for request in requests]


def test_requests_of_the_base_have_the_bits_of_a_server_without_adapters(plain, adapters, engine, rng):
    requests = asked(rng, adapters, 10, logprobs=2)
    base = [number for number, request in enumerate(requests) if request.adapter is None or number % 2]
    requests = [dataclasses.replace(one, adapter=None) if n in base else one for n, one in enumerate(requests)]
    found, alone = told(engine, requests), Engine(*plain, capacity=TIGHT)
    assert [found[number] for number in base] == told(alone, [requests[number] for number in base])


@pytest.mark.parametrize("drafter", [REPEATS, HalfRight])
def test_drafts_change_no_token_of_an_adapter(drafter, plain, room, adapters, engine, rng):
    requests = asked(rng, adapters, 6)
    texts = ids_of(engine, requests)
    if drafter is HalfRight:
        drafter = HalfRight([[*one.prompt, *ids] for one, ids in zip(requests, texts, strict=True)])
    assert ids_of(loaded(Engine(*room, capacity=TIGHT, drafter=drafter), adapters), requests) == texts


@pytest.mark.full
@pytest.mark.draws(1)
def test_texts_of_adapters_do_not_depend_on_the_layout(plain, adapters, rng):
    layout = {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()}
    requests = asked(rng, adapters, 6)
    split = loaded(Engine(*with_room(plain, 4, **layout), capacity=TIGHT), adapters)
    check_merged(plain, adapters, requests, ids_of(split, requests))


def test_adapters_come_and_go_while_others_are_served(plain, room, adapters, rng):
    """With the program that there was, and no page of a former adapter is found by one with its name."""
    engine = Engine(*room, capacity=TIGHT)
    engine.warm_up()
    compiles, (first, second, *_) = engine.stats().compiles, adapters.values()
    engine.load_adapter("mine", first)
    prompt = tuple(rng.integers(0, VOCAB, 17).tolist())
    request = Request(prompt, Sampling(tokens=20, temperature=0), adapter="mine")
    base, ids = dataclasses.replace(request, adapter=None), {}
    running, other = engine.submit(request), engine.submit(base)
    for _ in range(8):
        read(engine, ids)
    engine.load_adapter("mine", second)
    reloaded = engine.submit(request)
    read(engine, ids)
    engine.unload_adapter("mine")
    with pytest.raises(UserError, match="mine"):
        engine.submit(request)
    while engine.busy:
        read(engine, ids)
    numbers = running, reloaded, other
    was = [dataclasses.replace(request, adapter=one) for one in ("first", "second", None)]
    check_merged(plain, {"first": first, "second": second}, was, [ids[number] for number in numbers])
    assert engine.stats().compiles == compiles
    engine.load_adapter("mine", first)  # of whose former version there are pages
    for reused in (0, 16):
        before = engine.stats().prefix_hits
        assert ids_of(engine, [request]) == [ids[running]]
        assert engine.stats().prefix_hits == before + reused


def read(engine, ids):
    for update in engine.step():
        ids.setdefault(update.request, []).extend(update.ids)


def test_the_ranks_of_an_adapter_are_free_when_no_request_of_it_runs(room, rng):
    engine, rank = Engine(*room, capacity=TIGHT), ROOM.rank
    small, large = (drawn_adapter(room[0], size, rng) for size in (3, rank - 1))
    engine.load_adapter("small", small)
    engine.load_adapter("small", small)  # in its own place
    number = engine.submit(Request((1, 2), Sampling(tokens=9, temperature=0), adapter="small"))
    engine.unload_adapter("small")
    with pytest.raises(
        UserError, match=f"'large' is of rank {rank - 1}, and {rank - 3} of {rank} are free.*--adapter-rank"
    ):
        engine.load_adapter("large", large)
    engine.cancel(number)
    engine.load_adapter("large", large)
    assert engine.adapters == ("large",)


def test_what_is_no_adapter_of_the_model_is_refused(room, adapters, engine, rng):
    good = drawn_adapter(room[0], 1, rng)
    path = str(rng.choice(sorted(good.factors)))
    with pytest.raises(UserError, match=path):
        engine.load_adapter("new", Adapter(1, {path: good.factors[path] * np.nan}))
    with pytest.raises(UserError, match=path):
        engine.load_adapter("new", Adapter(2, {path: good.factors[path]}))
    with pytest.raises(UserError, match=r"adapts layers/moe/up.*--adapter NAME=PATH; else merge it"):
        engine.load_adapter("new", Adapter(1, {"layers/moe/up/a": np.zeros((2, 8, 32, 1))}))
    with pytest.raises(UserError, match=r"of rnak.*Did you mean 'of rank"):
        engine.submit(Request((1, 2), adapter="of rnak 1"))
    assert engine.adapters == tuple(adapters)


MIXTRAL = Mixtral(VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=16, routing=Routing(8, 2))
TIED = dataclasses.replace(LLAMA, tied=True)
SPLIT = {"mesh": {"expert": 2, "tensor": 2}, "rows": sequence_parallel()}


@pytest.mark.few(model=[LLAMA], layout=({},))
@pytest.mark.parametrize("model", [LLAMA, TIED, MIXTRAL], ids=["head", "tied", "experts"])
@pytest.mark.parametrize("layout", [{}, SPLIT], ids=["one device", "split"])
def test_eight_adapters_in_one_batch_have_the_logits_of_their_merged_models(model, layout, rng):
    """Of all matrices: those of the layers, experts', the embedding's table and the head."""
    parts = made(model, int(rng.integers(2**31)))
    own = with_room(parts, 4 if layout else 1, **layout)
    adapters = {f"{number}": drawn_adapter(own[0], 1, rng) for number in range(8)}
    assert {"embedding/table", *(() if model.tied else ("head",))} < {*own[0].operands}
    prompts = rng.integers(0, VOCAB, (8, 6)).tolist()
    sampling = Sampling(tokens=5, temperature=0, logprobs=2)
    requests = [Request(tuple(one), sampling, adapter=name) for one, name in zip(prompts, adapters, strict=True)]
    engine = Engine(*own, capacity=dataclasses.replace(TIGHT, requests=8, tokens=64, cache_tokens=600))
    compared = 0
    for request, told_of in zip(requests, told(loaded(engine, adapters), requests), strict=True):
        ids = [one.token for one in told_of]
        values = merged(parts[1], adapters[request.adapter])
        logits = full_forward_pass(parts[0], values, parts[2], [*request.prompt, *ids])[len(request.prompt) - 1 : -1]
        known = ~np.isnan(logits[:, 0])  # not after a token whose experts rounding may choose
        logits, ids = logits[known], np.array(ids)[known]
        expected = np.take_along_axis(logits, ids[:, None], -1)[:, 0] - np.logaddexp.reduce(logits, axis=-1)
        found = np.array([one.logprob for one in told_of])[known]
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.max(np.abs(logits), initial=1.0), rtol=0)
        compared += len(found)
    assert compared >= 8


FAMILIES = {
    "window": dataclasses.replace(LLAMA, window=5, qk_norm=True, bias=True, tied=True),
    "latents": DeepSeek(
        VOCAB, 32, layers=2, first_dense=1, heads=4, mlp=48, expert_mlp=16, shared=16, q_latent=16, kv_latent=12,
        nope_dim=6, rope_dim=4, value_dim=8, routing=Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1),
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_answered_as_by_its_merged_model(family, rng):
    parts = made(FAMILIES[family], int(rng.integers(2**31)))
    own = with_room(parts)
    adapters = {str(rank): drawn_adapter(own[0], rank, rng) for rank in RANKS}
    requests = asked(rng, adapters, 6)
    check_merged(parts, adapters, requests, ids_of(loaded(Engine(*own, capacity=TIGHT), adapters), requests))


def test_a_step_that_is_only_described_has_the_factors_and_whose_they_are(room, engine):
    program = ServingProgram(room[0], TIGHT)
    program.traced(program.decode)
    inputs = program._inputs(program.decode)
    assert (inputs.adapters.shape, inputs.owners.shape) == ((program.decode.tokens,), (ROOM.rank,))
    plain = Runtime(LLAMA, Layout(), devices=jax.devices()[:1])
    more = sum(x.size for path, x in flattened(engine.parameters).items() if path.endswith(("/a", "/b")))
    assert program.parameter_bytes() == ServingProgram(plain, TIGHT).parameter_bytes() + 4 * more


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_over_weights_in_few_bits_each_is_answered_as_with_its_adapter_alone(weights, rng):
    wide = dataclasses.replace(LLAMA, embed=64, mlp=128)
    values = made(wide, int(rng.integers(2**31)))[1]

    def runtime(transform):
        return Runtime(wide, Layout(), devices=jax.devices()[:1], weights=weights, transforms=[transform])

    together = runtime(ROOM)
    adapters = {str(rank): drawn_adapter(together, rank, rng) for rank in (2, 3)}
    requests = asked(rng, adapters, 6)
    found = ids_of(loaded(Engine(together, values, capacity=TIGHT), adapters), requests)
    for name, adapter in adapters.items():
        alone = runtime(LoRA(("layers/*", "embedding/*", "head"), adapter.rank, alpha=float(adapter.rank)))
        beside = flattened(as_stored(alone, values)) | adapter.factors
        own = [number for number, request in enumerate(requests) if request.adapter == name]
        engine = Engine(alone, nested(beside), capacity=TIGHT)
        asked_alone = [dataclasses.replace(requests[number], adapter=None) for number in own]
        assert [found[number] for number in own] == ids_of(engine, asked_alone)
