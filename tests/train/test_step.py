"""The training step: its loss, its update, its metrics, and what it does with memory and devices."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.layout import Layout, LayoutError, sequence_parallel
from axon.nn import Depth, LanguageModel, Param, RMSNorm, Segment, constant
from axon.precision import Precision
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant, Linear
from axon.train.step import Program
from models.llama import Block, Llama

MODEL = Llama(vocab=64, embed=32, layers=1, heads=4, kv_heads=4, mlp=48, bias=True)
ROWS, SEQ = 8, 16


def program(layout=None, optimizer=None, model=MODEL, **options):
    layout = layout or Layout({"data": 1})
    count = int(np.prod(list(layout.mesh.values())))
    optimizer = optimizer or AdamW(Constant(1e-3), clip=None)
    return Program(model, layout, optimizer, batch=ROWS, seq=SEQ, devices=jax.devices()[:count], **options)


def flat(tree):
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(v) for p, v in leaves(tree)}


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


@pytest.fixture(scope="module")
def plain():
    """A program without clipping, compiled once for the tests that only look at it."""
    return program(objective=NextToken(z_loss=0.3))


@pytest.fixture
def begin(begun, seed):
    """begin(program): its state at step 0, of the same values each time."""
    return lambda program: begun(program, np.random.default_rng(seed))


@pytest.fixture(scope="module")
def half():
    """A sharded program that computes in bfloat16."""
    layout = Layout({"data": 4, "tensor": 2}, zero=1)
    return program(layout, AdamW(Constant(1e-2)), precision=Precision("bfloat16"))


def first_gradients(state, optimizer):
    """Adam's first moment after one step is (1 − b1) of the gradient."""
    return {path: mu / (1 - optimizer.b1) for path, mu in flat(state.optimizer["direction"].mu).items()}


def test_the_loss_is_the_mean_over_real_tokens_without_the_z_loss(plain, begin, rng, packed_batch):
    batch, state = packed_batch(rng, ROWS, SEQ, 64), begin(plain)
    evaluated = jax.device_get(plain.evaluate(state, plain.place(batch)))
    _, metrics = plain.step(state, plain.place(batch))
    nats, tokens = evaluated["loss"]
    assert tokens == metrics["tokens"] == batch["weights"].sum()
    np.testing.assert_allclose(metrics["loss"], nats / tokens, rtol=1e-6)


def test_padding_holds_whatever_it_likes(plain, begin, rng, packed_batch):
    batch = packed_batch(rng, ROWS, SEQ, 64)
    real = batch["weights"] > 0
    other = batch | {n: np.where(real, batch[n], rng.integers(0, 64, real.shape)) for n in ("tokens", "targets")}
    other = {n: v.astype(batch[n].dtype) for n, v in other.items()}
    (one, one_metrics), (two, two_metrics) = (plain.step(begin(plain), plain.place(b)) for b in (batch, other))
    np.testing.assert_allclose(two_metrics["loss"], one_metrics["loss"], rtol=1e-6)
    for path, value in flat(one.optimizer["direction"].mu).items():
        np.testing.assert_allclose(flat(two.optimizer["direction"].mu)[path], value, atol=1e-6)


def test_norms_are_those_of_each_parameters_gradient_in_the_order_of_the_parameters(plain, begin, rng, packed_batch):
    state, metrics = plain.step(begin(plain), plain.place(packed_batch(rng, ROWS, SEQ, 64)))
    gradients = first_gradients(state, plain.optimizer)
    for path, squared in zip(plain.parameters, np.asarray(metrics["norms"]), strict=True):
        np.testing.assert_allclose(squared, np.sum(gradients[path] ** 2), rtol=1e-4, atol=1e-12, err_msg=path)
    np.testing.assert_allclose(metrics["grad_norm"] ** 2, np.sum(metrics["norms"]), rtol=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_old_states_memory_is_reused_and_the_step_is_compiled_once(half, begin, rng, packed_batch):
    state, batch = begin(half), half.place(packed_batch(rng, ROWS, SEQ, 64))
    for step in range(3):
        old = state
        state, metrics = jax.block_until_ready(half.step(old, batch))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        assert int(state.step) == step + 1
    assert np.isfinite(metrics["loss"])
    assert half._step._cache_size() == 1, "the state that comes out lies where the one that goes in does"
    for (path, made), (_, promised) in zip(leaves(state), leaves(half.abstract_state()), strict=True):
        assert made.sharding.is_equivalent_to(promised.sharding, made.ndim), path
        assert (made.shape, made.dtype) == (promised.shape, promised.dtype), path


def test_three_steps_are_adamw_by_the_paper_with_decay_on_matrices_only(begin, rng, packed_batch):
    optimizer = AdamW(Linear(0.01, warmup=2, steps=5), b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.5, clip=0.4)
    clipped = program(optimizer=optimizer)
    state = begin(clipped)
    p = {path: v.astype(np.float64) for path, v in flat(state.parameters).items()}
    m, v, before = (dict.fromkeys(p, 0.0) for _ in range(3))
    for step in range(3):
        state, metrics = clipped.step(state, clipped.place(packed_batch(rng, ROWS, SEQ, 64)))
        rate = [0.005, 0.01, 0.01][step]
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
        mu = {path: value.astype(np.float64) for path, value in flat(state.optimizer["direction"].mu).items()}
        g = {path: (mu[path] - 0.8 * before[path]) / 0.2 for path in p}
        before, norm = mu, np.sqrt(sum(np.sum(x**2) for x in g.values()))
        np.testing.assert_allclose(norm, min(0.4, float(metrics["grad_norm"])), rtol=1e-4)
        for path in p:
            m[path], v[path] = 0.8 * m[path] + 0.2 * g[path], 0.9 * v[path] + 0.1 * g[path] ** 2
            moved = m[path] / (1 - 0.8 ** (step + 1)) / (np.sqrt(v[path] / (1 - 0.9 ** (step + 1))) + 1e-6)
            decay = 0.0 if path.endswith(("bias", "scale")) else 0.5
            p[path] = p[path] - rate * (moved + decay * p[path])
    for path, value in flat(state.parameters).items():
        np.testing.assert_allclose(value, p[path], atol=2e-5, err_msg=path)


def test_bf16_compute_keeps_float32_state_and_learns(half, begin, rng, packed_batch):
    state, batch = begin(half), half.place(packed_batch(rng, ROWS, SEQ, 64))
    losses = []
    for _ in range(20):
        state, metrics = jax.block_until_ready(half.step(state, batch))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert {x.dtype for x in jax.tree.leaves(state.parameters)} == {jnp.dtype("float32")}
    assert "bf16" in half.lower().as_text()


@cache
def compiled(zero):
    """The text of a step of two microbatches on four devices."""
    return program(Layout({"data": 4}, zero=zero, microbatches=2)).lower().compile().as_text()


def gradients_reduced(zero):
    """The shapes of what collectives give inside and outside of the loop over microbatches, scalars left out."""
    text = compiled(zero)
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    collective = re.compile(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)[\w-]*\(")
    inside, outside, computation = [], [], ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(", line):
            computation = header[1]
        for found in collective.finditer(line):
            (inside if computation in bodies else outside).append(found[1])
    assert bodies
    return [shape for shape in inside if shape != "f32[]"], outside


@pytest.mark.full
@pytest.mark.draws(1)
def test_gradient_accumulation_reduces_once_after_the_loop():
    """Explicit axes: no collective on gradients inside the loop over microbatches, only the loss's own scalar."""
    inside, outside = gradients_reduced(zero=1)
    assert not inside
    assert any("f32[1,32,48]" in shape for shape in outside), "the gradient of a stacked matrix is reduced, once"


@pytest.mark.full
@pytest.mark.draws(1)
def test_with_zero_2_gradients_are_reduced_in_each_microbatch_and_added_up_as_they_are_split():
    """What the loop carries of a matrix `layers 1, embed 32, mlp 48` is a fourth."""
    inside, _ = gradients_reduced(zero=2)
    assert any("f32[1,32,48]" in shape for shape in inside)
    carried = "".join(re.findall(r"= (\(.*?\)) while\(", compiled(2)))
    whole, quarter = (carried.count(f"f32[1,{embed},48]") for embed in (32, 8))
    assert whole == quarter == 2, "gate and up, and their gradients"


class Spoilt(LanguageModel):
    """A model with one parameter whose gradient, and nothing else, is NaN."""

    def __init__(self, config):
        depth, norm = Depth(Segment(1, block=Block(config))), RMSNorm("embed", config.dims)
        super().__init__(config.dims, depth, norm, tied=True, embedding_stddev=1.0)
        self.probe = Param("mlp", config.dims, constant(1.0))

    def embed(self, inputs):
        return super().embed(inputs) + jnp.sqrt(0.0 * jnp.sum(self.probe.get_value()))


class SpoiltConfig:
    def build(self):
        return Spoilt(MODEL)


def test_norms_point_at_the_parameter_whose_gradient_is_not_finite(begin, rng, packed_batch):
    spoilt = program(model=SpoiltConfig())
    _, metrics = spoilt.step(begin(spoilt), spoilt.place(packed_batch(rng, ROWS, SEQ, 64)))
    assert np.isfinite(metrics["loss"])
    bad = [path for path, n in zip(spoilt.parameters, np.asarray(metrics["norms"]), strict=True) if not np.isfinite(n)]
    assert bad == ["probe"]


def test_a_layout_that_cannot_hold_the_model_is_refused_before_tracing():
    with pytest.raises(LayoutError, match=r"parameter layers/block/attention/key: axis 'kv_heads' of size 4 .* 8"):
        program(Layout({"tensor": 8}))
    with pytest.raises(LayoutError, match="the batch: 8 sequences are not divisible by 16"):
        program(Layout({"data": 8}, microbatches=2))


class PipelineSplit(LanguageModel):
    """A model that gives the width of what it looks up a role of its own."""

    def __init__(self, config):
        depth, norm = Depth(Segment(1, block=Block(config))), RMSNorm("embed", config.dims)
        super().__init__(config.dims, depth, norm, tied=True, embedding_stddev=1.0)

    def embed(self, inputs):
        return shard(super().embed(inputs), "batch seq.residual embed.looked_up")


class CutConfig:
    def build(self):
        return PipelineSplit(MODEL)


def test_a_mesh_axis_may_be_for_a_role_that_only_the_models_own_patterns_name():
    layout = Layout({"data": 2, "mine": 2}, rows={"embed.looked_up": "mine"}, order=("data", "mine"))
    assert "embed.looked_up" in program(layout, model=CutConfig()).evaluator.axes_used()
    with pytest.raises(LayoutError, match=r"no axis 'embed\.looked_up'.*\n.*'mine' = 2 is not used"):
        program(layout)
    with pytest.raises(LayoutError, match=r"no axis 'embed\.lookup', .* Did you mean 'embed\.looked_up'"):
        program(Layout({"data": 2}, rows={"embed.lookup": None}), model=CutConfig())


@pytest.mark.parametrize("mesh", [{"replica": 2, "tensor": 2}, {"data": 2, "tensor": 2}])
def test_zero_on_a_mesh_where_it_splits_nothing_is_said(mesh):
    assert ("ZeRO" in program(Layout(mesh, zero=2)).choices) == ("data" not in mesh)


@pytest.mark.few(microbatches=(1,), idle=("'data'", "'tensor' and 'kv'", None))
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("mesh", "options", "idle"),
    [
        ({"data": 4}, {"zero": 3, "overlap": ("data",)}, "'data'"),
        ({"tensor": 4}, {"overlap": ("tensor",)}, "'tensor'"),
        ({"tensor": 4}, {"overlap": ("tensor",), "replicate_kv": 2}, "'tensor' and 'kv'"),
        ({"data": 2, "tensor": 2}, {"rows": sequence_parallel(), "overlap": ("data", "tensor")}, "'data'"),
        ({"data": 2, "tensor": 2}, {"rows": sequence_parallel(), "overlap": ("tensor",)}, None),
        ({"tensor": 4}, {"rows": sequence_parallel(), "overlap": ("tensor",), "replicate_kv": 2}, None),
        ({"data": 2, "tensor": 1}, {"overlap": ("tensor",)}, None),
    ],
)
def test_an_overlap_that_makes_no_ring_is_said(mesh, options, idle, microbatches):
    traced = program(Layout(mesh, microbatches=microbatches, **options))
    traced.trace()
    told = traced.choices.get("overlap", "")
    assert told.startswith(f"nothing is overlapped over {idle}: ") if idle else not told


def test_choices_made_while_tracing_are_noticed(plain):
    plain.lower()
    assert plain.choices["layers"] == "1 × block unrolled, remat none"
    assert plain.choices["attention"] == "xla, causal & same document"
