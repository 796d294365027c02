"""JAX's splash attention under our masks, interpreted on a CPU, against the reference; and when it is taken."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.kernels.attention import Causal, Everything, SameDocument, Window, attention, attention_reference, splash
from axon.kernels.attention.mask import Mask

MASKS = [Everything(), Causal(), Causal() & Window(70), Causal() & SameDocument(), Window(200) & SameDocument()]


def draw(rng, length=256, heads=2, kv_heads=1, width=64):
    shapes = (1, length, heads, width), (1, length, kv_heads, width), (1, length, kv_heads, width)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    documents = np.sort(rng.integers(0, 3, (1, length)), axis=1).astype(np.int32)
    return q, k, v, documents


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_values_and_gradients_are_those_of_the_reference(mask, rng, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    q, k, v, documents = draw(rng)
    weight = rng.normal(size=q.shape).astype(np.float32)
    scale = float(rng.uniform(0.05, 0.2))

    def run(implementation, **more):
        def objective(q, k, v):
            out = implementation(q, k, v, mask, documents=(documents, documents), scale=scale, **more)
            return jnp.sum(out * weight), out

        (_, out), gradients = jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
        return out, *gradients

    ours, reference = run(splash.attention_splash, interpret=True), run(attention_reference, start=0)
    for one, other in zip(ours, reference, strict=True):
        assert relative(one, other) < 1e-5


@pytest.mark.parametrize(("kept", "forwards"), [((), 2), (("attention",), 1)])
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10.2's jaxpr still shows the second forward")
def test_a_remat_policy_that_keeps_attention_runs_its_forward_once(kept, forwards, rng):
    q, k, v, _ = draw(rng, length=128)

    def layer(q):
        return splash.attention_splash(jnp.sin(q), k, v, Causal(), None, 0.1, interpret=True)

    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(jnp.cos(jax.checkpoint(layer, policy=policy)(q)))))(q)
    assert str(jaxpr).count("name=splash_mha_fwd") == forwards


@pytest.fixture
def on_tpu(placed):
    """on_tpu(platform): a scope whose layout is one of TPUs, for choosing a kernel, not for running it."""

    def scope(platform="tpu"):
        placement = SimpleNamespace(platform=platform, explicit=True)
        return axes.activate(axes.Scope(placement))

    return scope


def traced(q, k, v, mask, **more):
    return str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, mask, **more))(q, k, v))


def test_it_is_taken_on_tpus_and_never_elsewhere(rng, on_tpu):
    q, k, v, _ = draw(rng)
    for platform, taken in (("tpu", True), ("cpu", False), ("gpu", False)):
        with on_tpu(platform) as scope:
            assert ("pallas_call" in traced(q, k, v, Causal())) == taken
            assert scope.notices["attention"].startswith("splash attention") == taken


class Strange(Mask):
    def __str__(self):
        return "strange"


@pytest.mark.parametrize(
    ("shapes", "mask", "start", "reason"),
    [
        ({"length": 200}, Causal(), 0, "a sequence that 128 divides, not 200"),
        ({"width": 48}, Causal(), 0, "a head_dim of 64, 128, 256, not 48"),
        ({}, Causal() & Strange(), 0, "no mask strange"),
        ({}, Causal(), 3, "the first query is at 3"),
    ],
)
def test_what_does_not_fit_it_takes_xla_and_says_why(shapes, mask, start, reason, rng, on_tpu):
    q, k, v, _ = draw(rng, **shapes)
    with on_tpu() as scope:
        assert "pallas_call" not in traced(q, k, v, mask, start=start)
    assert reason in scope.notices["attention"]


@pytest.mark.parametrize(("length", "block"), [(128, 128), (2048, 1024), (1152, 384), (8192, 1024)])
def test_blocks_divide_the_sequence(length, block):
    blocks = splash._blocks(length)
    assert blocks.block_q == blocks.block_kv == block
    assert block % blocks.block_kv_compute == 0
