"""Models whose blocks keep states of sequences, served: what is written is what the full forward pass finds, whatever
runs beside it."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from random_models import (
    REPEATS,
    TIGHT,
    VOCAB,
    HalfRight,
    drawn_requests,
    ids_of,
    ids_of_any_order,
    likeliest,
    likeliest_draws,
    made,
)

from axon.axes import einsum
from axon.errors import UserError
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.nn import Attention, Auxiliary, CacheSpec, Depth, LanguageModel, Param, RMSNorm, Rope, Routing, Segment
from axon.serve.draft_model import DraftModel
from axon.serve.engine import Engine
from axon.serve.multi_token import MultiToken
from axon.serve.program import ServingProgram
from axon.serve.request import Request, Sampling
from axon.serve.snapshots import Snapshots
from axon.serve.speculation import NGram
from axon.serve.step import windows_of
from models.qwen3_next import Qwen3Next

pytestmark = pytest.mark.usefixtures("caches")

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


@pytest.fixture(
    scope="module", params=["hybrid", *(pytest.param(name, marks=pytest.mark.full) for name in [*MODELS][1:])]
)
def family(request, shared_seed):
    """A runtime, parameters and variables, and an engine of them, to be left idle."""
    parts = made(MODELS[request.param], shared_seed, **LAYOUT)
    return parts, Engine(*parts, capacity=TIGHT)


@pytest.mark.full
@pytest.mark.draws(1)
def test_many_at_once_in_chunks_and_preempted_write_what_the_full_forward_pass_finds(family, rng):
    parts, engine = family
    long = [Request(tuple(rng.integers(0, VOCAB, 18).tolist()), Sampling(30, temperature=0)) for _ in range(3)]
    requests, before = [*long, *drawn_requests(rng, 5, temperature=0)], engine.stats().preemptions
    for request, ids in zip(requests, ids_of(engine, requests), strict=True):
        assert ids == likeliest(*parts, request.prompt, ids)
    releases_pages = windows_of(parts[0].module) != (None,)
    assert releases_pages or engine.stats().preemptions > before


def test_what_is_drawn_does_not_depend_on_what_runs_beside_it(family, rng):
    _, engine = family
    requests = drawn_requests(rng, 6, temperature=1.0)
    together = ids_of(engine, requests)
    assert together == [ids_of(engine, [request])[0] for request in requests]


@pytest.mark.full
def test_text_does_not_depend_on_the_layout(seed, rng):
    requests = drawn_requests(rng, 4, temperature=0.5)
    one, split = (made(Hybrid(), seed, devices, mesh=mesh, **LAYOUT) for devices, mesh in ((1, {}), (2, {"tensor": 2})))
    for parts in (one, split):
        for request, ids in zip(requests, ids_of(Engine(*parts, capacity=TIGHT), requests), strict=True):
            assert ids == likeliest_draws(*one, request, ids)


def test_a_plan_counts_the_states_of_all_slots(family):
    (runtime, *_), _ = family
    program = ServingProgram(runtime, TIGHT)
    heads, width = 2, 8
    assert program.state_bytes() == 2 * TIGHT.requests * heads * width * (1 + width) * 4
    assert program.snapshot_bytes() == program.state_bytes()
    assert ServingProgram(runtime, replace(TIGHT, snapshots=1)).snapshot_bytes() * 4 == program.state_bytes()
    pages = sum(spec.nbytes for specs, _ in program.caches for spec in specs.values())
    assert program.cache_bytes() == pages + 2 * program.state_bytes()


@pytest.mark.full
@pytest.mark.draws(1)
def test_rejected_guesses_leave_nothing_in_a_state(family, rng):
    (runtime, *weights), plain = family
    long = Request(tuple(rng.integers(0, VOCAB, 9).tolist()), Sampling(20, temperature=0))
    requests = [long, *drawn_requests(rng, 6, temperature=0)]
    expected = ids_of(plain, requests)
    drafter = HalfRight([[*one.prompt, *ids] for one, ids in zip(requests, expected, strict=True)])
    guessing = Engine(runtime, *weights, capacity=TIGHT, drafter=drafter)
    assert ids_of(guessing, requests) == expected
    stats = guessing.stats()
    assert 0 < stats.accepted < stats.drafted


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
        (ids,) = ids_of(engine, [request])
        assert ids == likeliest(*parts, request.prompt, ids)
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
    parts, others = (made(Hybrid(), one, **LAYOUT) for one in (seed, seed + 1))
    engine = Engine(*parts, capacity=TIGHT)
    request = Request(tuple(rng.integers(0, VOCAB, 20).tolist()), Sampling(8, temperature=0))
    ids_of(engine, [request])
    engine.swap(others[1])
    (ids,) = ids_of(engine, [request])
    assert ids == likeliest(*others, request.prompt, ids)


def test_after_the_warm_up_nothing_compiles(rng):
    engine = Engine(*made(Hybrid(), 0, **LAYOUT), capacity=TIGHT)
    engine.warm_up()
    compiled = engine.stats().compiles
    common = tuple(rng.integers(0, VOCAB, 18).tolist())
    for _ in range(2):
        ids_of(engine, [Request(common, Sampling(4, temperature=0))])
    assert engine.stats().prefix_hits
    assert engine.stats().compiles == compiled


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_priorities_cancellations_shared_prefixes_and_guesses_change_no_token(model, seed, rng):
    parts = made(MODELS[model], seed, **LAYOUT)
    engine = Engine(*parts, capacity=TIGHT, drafter=REPEATS)
    requests = drawn_requests(rng, 20, temperature=0) + drawn_requests(rng, 20, temperature=0)
    for request, ids in ids_of_any_order(engine, requests, rng):
        assert ids == likeliest(*parts, request.prompt, ids)
    stats = engine.stats()
    assert stats.preemptions or model == "windowed"
    assert stats.prefix_hits or model == "windowed"  # whose pages are freed behind the window


QWEN3_NEXT = Qwen3Next(
    VOCAB, 32, 4, 4, kv_heads=2, mlp=16, shared=16, delta_heads=2, per_head=3, key_dim=8, value_dim=6, full_every=2,
    head_dim=8, routing=Routing(4, 4), norm_eps=1e-3, multi_token=True,
)  # fmt: skip
"""All of its experts, of which rounding could change the choice."""


@pytest.mark.full
@pytest.mark.draws(1)
def test_qwen3_next_writes_the_same_in_chunks_with_prefixes_preempted_and_with_its_own_drafts(seed, rng):
    """A period of its layers, and prompts of three steps each."""
    parts = made(replace(QWEN3_NEXT, layers=2), seed, **LAYOUT)
    engine = Engine(*parts, capacity=replace(TIGHT, tokens=8), drafter=MultiToken())
    common = rng.integers(0, VOCAB, 17).tolist()
    requests = [Request((*common, token), Sampling(24, temperature=0)) for token in range(4)]
    for some in (requests[:1], requests):
        for request, ids in zip(some, ids_of(engine, some), strict=True):
            assert ids == likeliest(*parts, request.prompt, ids)
    stats = engine.stats()
    assert stats.prefix_hits >= 16
    assert stats.preemptions
    assert stats.drafted > stats.accepted


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_qwen3_next_writes_what_the_full_forward_pass_finds(devices, seed, rng):
    mesh, draft = ({"tensor": devices}, NGram(3)) if devices > 1 else ({}, None)
    parts = made(QWEN3_NEXT, seed, devices, mesh=mesh, **LAYOUT)
    engine, requests = Engine(*parts, capacity=TIGHT, drafter=draft), drawn_requests(rng, 6, temperature=0)
    for request, ids in zip(requests, ids_of(engine, requests), strict=True):
        assert ids == likeliest(*parts, request.prompt, ids)
