"""Models whose blocks keep states of sequences, served: what is written is what the full forward pass finds, whatever
runs beside it."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from axon.axes import einsum
from axon.errors import UserError
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.layout import Layout
from axon.nn import (
    Attention,
    Auxiliary,
    CacheSpec,
    Depth,
    Inputs,
    LanguageModel,
    Param,
    RMSNorm,
    Rope,
    Routing,
    Segment,
)
from axon.runtime import Runtime, nested
from axon.serve.capacity import Capacity
from axon.serve.draft_model import DraftModel
from axon.serve.engine import Engine
from axon.serve.program import ServingProgram
from axon.serve.request import Request, Sampling
from axon.serve.snapshots import Snapshots
from axon.serve.speculation import NGram
from axon.serve.step import windows_of
from models.qwen3_next import Qwen3Next

pytestmark = pytest.mark.usefixtures("caches")

VOCAB = 64
TIGHT = Capacity(requests=4, tokens=16, length=60, page_size=4, cache_tokens=72)
"""So few pages that requests are preempted, so few tokens a step that prompts come in chunks."""
LONGEST = 64
RESIDUAL = "batch seq.residual embed"


@dataclass(frozen=True)
class Hybrid:
    """Linear attention, and every second layer attention, with this mask; None: linear attention alone."""

    vocab: int = VOCAB
    embed: int = 32
    heads: int = 2
    mask: Mask | None = Causal() & SameDocument()

    def build(self):
        dims = {"vocab": self.vocab, "embed": self.embed, "heads": self.heads, "kv_heads": self.heads, "head_dim": 8}
        kinds = {"linear": Mixing(dims, LinearAttention(dims))}
        if self.mask is not None:
            kinds["full"] = Mixing(dims, Attention(dims, self.mask, rope=Rope()))
        return LanguageModel(dims, Depth(Segment(2, **kinds)), RMSNorm("embed", dims), tied=True)


class Mixing(nnx.Module):
    """A mixer on the normalised residual stream, added to it."""

    def __init__(self, dims, mixer):
        self.norm, self.mixer = RMSNorm("embed", dims), mixer

    def __call__(self, x, inputs, cache=None):
        out, cache = self.mixer(self.norm(x, RESIDUAL), inputs, cache)
        return x + out, cache, Auxiliary()

    def cache_specs(self, batch, length):
        return self.mixer.cache_specs(batch, length)


class LinearAttention(nnx.Module):
    """S = 0.9·S + k vᵀ, out = q S, of k that is summed over the last two tokens."""

    def __init__(self, dims):
        self.query, self.key, self.value = (Param("embed heads head_dim", dims) for _ in range(3))
        self.out, self.dims = Param("heads head_dim embed", dims), dims

    def __call__(self, x, inputs, cache=None):
        project = "batch seq embed, embed heads head_dim -> batch seq heads head_dim"
        q, k, v = (einsum(project, x, weight) for weight in (self.query, self.key, self.value))
        if cache is None:
            k = k + jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
            tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v))
            _, out = lax.scan(recurrence, jnp.zeros((x.shape[0], *self.state_shape)), tokens)
            out = jnp.moveaxis(out, 0, 1)
        else:
            window, last = inputs.rows.windows(k, cache["last"])
            state, out = inputs.rows.scan(recurrence, cache["state"], (q, window.sum(axis=2), v))
            cache = {"last": last, "state": state}
        return einsum(
            "batch seq heads head_dim, heads head_dim embed -> batch seq.residual embed", out, self.out
        ), cache

    @property
    def state_shape(self):
        return self.dims["heads"], self.dims["head_dim"], self.dims["head_dim"]

    def cache_specs(self, batch, length):
        heads, width, _ = self.state_shape
        last, state = ("batch", "last", "heads", "head_dim"), ("batch", "heads", "head_dim", "value_dim")
        return {
            "last": CacheSpec(last, (batch, 1, heads, width), cache_kind="state"),
            "state": CacheSpec(state, (batch, *self.state_shape), cache_kind="state"),
        }


def recurrence(state, token):
    q, k, v = token
    state = 0.9 * state + k[..., None] * v[..., None, :]
    return state, jnp.sum(q[..., None] * state, axis=-2)


MODELS = {
    "hybrid": Hybrid(),
    "windowed": Hybrid(mask=Causal() & Window(5) & SameDocument()),
    "states alone": Hybrid(mask=None),
}
LAYOUT = {"rows": {"last": None, "value_dim": None}}


def made(model, seed, devices=1, mesh=None):
    runtime = Runtime(model, Layout(mesh or {}, **LAYOUT), devices=jax.devices()[:devices])
    rng = np.random.default_rng(seed)

    def value(leaf):
        return jax.device_put(rng.normal(0, 0.4, leaf.shape).astype(np.float32), leaf.sharding)

    values = jax.tree.map(value, runtime.abstract(dict(runtime.parameters)))
    return runtime, nested(values), runtime.initialise_variables(0)


@pytest.fixture(scope="module", params=MODELS)
def family(request):
    """A runtime, parameters and variables, and an engine of them, to be left idle."""
    parts = made(MODELS[request.param], np.random.default_rng().integers(2**31))
    return parts, Engine(*parts, capacity=TIGHT)


def answers(engine, requests):
    """The ids that follow each request, all asked at once."""
    numbers, ids = [engine.submit(request) for request in requests], {}
    while engine.busy:
        for update in engine.step():
            ids.setdefault(update.request, []).extend(update.ids)
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    return [ids[number] for number in numbers]


def drawn_requests(rng, count, **sampling):
    """Some of which begin alike."""
    common = rng.integers(0, VOCAB, 20).tolist()
    found = []
    for number in range(count):
        shared = common[: int(rng.integers(0, 20))] if number % 2 else []
        prompt = [*shared, *rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()]
        found.append(Request(tuple(prompt), Sampling(tokens=int(rng.integers(1, 20)), seed=number, **sampling)))
    return found


def likeliest(parts, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them, without a cache."""
    runtime, values, variables = parts
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(prompt) + len(ids)] = [*prompt, *ids]

    def logits(values, tokens):
        model = runtime.bind(values, variables)
        places = jnp.arange(LONGEST, dtype=jnp.int32)[None]
        hidden, *_ = model.hidden(Inputs(tokens, places, jnp.zeros_like(tokens)))
        return model.output.logits(hidden)[0]

    with runtime.tracing():
        found = np.asarray(jax.jit(logits)(values, tokens)).argmax(axis=-1)
    return found[len(prompt) - 1 : len(prompt) + len(ids) - 1].tolist()


def test_many_at_once_in_chunks_and_preempted_write_what_the_full_forward_pass_finds(family, rng):
    parts, engine = family
    long = [Request(tuple(rng.integers(0, VOCAB, 18).tolist()), Sampling(30, temperature=0)) for _ in range(3)]
    requests, before = [*long, *drawn_requests(rng, 5, temperature=0)], engine.stats().preemptions
    for request, ids in zip(requests, answers(engine, requests), strict=True):
        assert ids == likeliest(parts, request.prompt, ids)
    releases_pages = windows_of(parts[0].module) != (None,)
    assert releases_pages or engine.stats().preemptions > before


def test_what_is_drawn_does_not_depend_on_what_runs_beside_it(family, rng):
    _, engine = family
    requests = drawn_requests(rng, 6, temperature=1.0)
    together = answers(engine, requests)
    assert together == [answers(engine, [request])[0] for request in requests]


def test_text_does_not_depend_on_the_layout(seed, rng):
    requests = drawn_requests(rng, 4, temperature=0.5)
    one, split = (
        answers(Engine(*made(Hybrid(), seed, devices, mesh), capacity=TIGHT), requests)
        for devices, mesh in ((1, None), (2, {"tensor": 2}))
    )
    assert one == split


def test_a_plan_counts_the_states_of_all_slots(family):
    (runtime, *_), _ = family
    program = ServingProgram(runtime, TIGHT)
    heads, width = 2, 8
    assert program.state_bytes() == 2 * TIGHT.requests * heads * width * (1 + width) * 4
    assert program.snapshot_bytes() == program.state_bytes()
    assert ServingProgram(runtime, replace(TIGHT, snapshots=1)).snapshot_bytes() * 4 == program.state_bytes()
    pages = sum(spec.nbytes for specs, _ in program.caches for spec in specs.values())
    assert program.cache_bytes() == pages + 2 * program.state_bytes()


def test_rejected_guesses_leave_nothing_in_a_state(family, rng):
    """Of texts that repeat, so that some guesses are right, and some come from elsewhere."""
    (runtime, *weights), plain = family
    guessing = Engine(runtime, *weights, capacity=TIGHT, drafter=Repeats())
    requests = drawn_requests(rng, 6, temperature=0)
    expected = answers(plain, requests)
    assert answers(guessing, requests) == expected
    stats = guessing.stats()
    assert 0 < stats.accepted < stats.drafted


class Repeats(NGram):
    """Guesses after single tokens, which are often wrong."""

    def __init__(self):
        super().__init__(longest=1, shortest=1, most=3)


def test_a_model_that_guesses_with_states_is_refused_by_both_names(family):
    (runtime, *weights), _ = family
    with pytest.raises(UserError) as error:
        Engine(runtime, *weights, capacity=TIGHT, drafter=DraftModel(runtime, *weights))
    assert all(part in str(error.value) for part in ("DraftModel", "states of sequences"))


def test_a_prefix_is_shared_by_its_snapshot_and_changes_no_token(family, rng):
    parts, engine = family
    common = rng.integers(0, VOCAB, 17).tolist()
    requests = [Request((*common, *rng.integers(0, VOCAB, 3).tolist()), Sampling(8, temperature=0)) for _ in range(3)]
    for expected, request in zip((0, 16, 16), requests, strict=True):
        hits = engine.stats().prefix_hits
        (ids,) = answers(engine, [request])
        assert ids == likeliest(parts, request.prompt, ids)
        assert engine.stats().prefix_hits - hits == expected


def test_where_a_snapshot_is_gone_the_prefix_is_computed_from_the_last_one_that_is_left(rng):
    snapshots, (a, b, c, d) = Snapshots(2), (bytes([i]) for i in range(4))
    assert {snapshots.save(a), snapshots.save(b)} == {0, 1}
    assert snapshots.save(a) is None
    held = snapshots.hold(b)
    assert snapshots.save(c) not in (None, held)
    assert (snapshots.known(a), snapshots.known(b), snapshots.known(c)) == (False, True, True)
    other = snapshots.hold(c)
    assert snapshots.save(d) is None
    snapshots.forget_all()
    assert not snapshots.known(b)
    snapshots.release(held)
    assert snapshots.save(d) == held
    snapshots.release(other)
    assert snapshots.save(a) == other


def test_other_weights_find_no_snapshot_of_the_ones_before(rng, seed):
    parts, others = made(Hybrid(), seed), made(Hybrid(), seed + 1)
    engine = Engine(*parts, capacity=TIGHT)
    request = Request(tuple(rng.integers(0, VOCAB, 20).tolist()), Sampling(8, temperature=0))
    answers(engine, [request])
    engine.swap(others[1])
    (ids,) = answers(engine, [request])
    assert ids == likeliest(others, request.prompt, ids)


def test_after_the_warm_up_nothing_compiles(rng):
    engine = Engine(*made(Hybrid(), 0), capacity=TIGHT)
    engine.warm_up()
    compiled = engine.stats().compiles
    common = tuple(rng.integers(0, VOCAB, 18).tolist())
    for _ in range(2):
        answers(engine, [Request(common, Sampling(4, temperature=0))])
    assert engine.stats().prefix_hits
    assert engine.stats().compiles == compiled


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_priorities_cancellations_shared_prefixes_and_guesses_change_no_token(model, seed, rng):
    parts = made(MODELS[model], seed)
    engine = Engine(*parts, capacity=TIGHT, drafter=Repeats())
    requests = [
        replace(request, priority=int(rng.integers(0, 3)))
        for request in [*drawn_requests(rng, 20, temperature=0), *drawn_requests(rng, 20, temperature=0)]
    ]
    waiting, running, ids, cancelled = list(requests), {}, {}, set()
    while waiting or engine.busy:
        for request in [waiting.pop() for _ in range(min(len(waiting), int(rng.integers(0, 4))))]:
            running[engine.submit(request)] = request
        if running and rng.random() < 0.05:
            cancelled.add(number := int(rng.choice([*running])))
            engine.cancel(number)
        for update in engine.step():
            ids.setdefault(update.request, []).extend(update.ids)
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    assert stats.preemptions or model == "windowed"
    assert stats.prefix_hits
    for number in running.keys() - cancelled:
        assert ids[number] == likeliest(parts, running[number].prompt, ids[number])


QWEN3_NEXT = Qwen3Next(
    VOCAB, 32, 4, 4, kv_heads=2, mlp=16, shared=16, delta_heads=2, per_head=3, key_dim=8, value_dim=6, full_every=2,
    head_dim=8, routing=Routing(4, 4), norm_eps=1e-3,
)  # fmt: skip
"""All of its experts, of which rounding could change the choice."""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_qwen3_next_writes_what_the_full_forward_pass_finds(devices, seed, rng):
    mesh, draft = ({"tensor": devices}, NGram(3)) if devices > 1 else (None, None)
    parts = made(QWEN3_NEXT, seed, devices, mesh)
    engine, requests = Engine(*parts, capacity=TIGHT, drafter=draft), drawn_requests(rng, 6, temperature=0)
    for request, ids in zip(requests, answers(engine, requests), strict=True):
        assert ids == likeliest(parts, request.prompt, ids)
