"""A `Layout.context` for each kind of block: loss and gradients are one device's."""

import math

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.nn import Rope
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.gemma import Gemma

MODEL = Gemma(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    heads=8,
    kv_heads=2,
    mlp=64,
    head_dim=4,
    layers=4,
    window=9,
    local_rope=Rope(100.0),
    soft_cap=2.0,
)
SEQUENCES, SEQ = 8, 32
OPTIMIZER = AdamW(Constant(1e-3), clip=None)

ONE, BOTH = {"data": 1}, {"context": 2, "ulysses": 2}
LAYOUTS = [
    Layout({"pipe": 2, "context": 4}, context={"local": "ring", "full": "ulysses"}, microbatches=2),
]
MORE = [
    Layout(BOTH, context={"local": "ring", "full": "usp"}),  # a ring of four, and one of two
    Layout({"context": 4}, context={"local": "ring", "full": "ulysses"}),  # whole sequences, stored zig-zag
    Layout({"context": 4}, context={"local": "gather", "full": "ring"}),
    Layout(BOTH, context={"local": "gather", "full": "usp"}),  # gathered over more devices than the ring has
    Layout({"context": 4, "tensor": 2}, context={"local": "gather", "full": "ulysses"}),
    Layout({"context": 4}, context={"full": "ulysses"}),  # of the others the rule's
    Layout({"data": 2, "context": 4}, context={"local": "ring", "full": "ulysses"}, zero=3, auto=True),
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    return (
        f"{mesh}: {', '.join(f'{kind} {method}' for kind, method in layout.context.items())}" + ", auto" * layout.auto
    )


def first_step(program, state, batch):
    """Loss, and gradients: (1 − b1) of each is Adam's first moment."""
    state, metrics = program.step(state, program.place(batch))
    return jax.device_get((metrics["loss"], state.optimizer["direction"].mu))


def program_on(layout, seed):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    return Program(MODEL, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, devices=devices)


@pytest.fixture(scope="module")
def expected(packed_batch, shared_seed):
    """Seed and batch, drawn once for all layouts, and one device's loss and gradients."""
    batch = packed_batch(np.random.default_rng(shared_seed), SEQUENCES, SEQ, MODEL.vocab)
    one = program_on(Layout(ONE), shared_seed)
    return shared_seed, batch, *first_step(one, one.init(), batch)


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(one, marks=pytest.mark.full) for one in LAYOUTS),
        *(pytest.param(one, marks=pytest.mark.slow) for one in MORE),
    ],
    ids=described,
)
def test_each_kind_of_block_sees_whole_sequences_in_its_own_way(layout, expected):
    seed, batch, loss, gradients = expected
    print(f"seed {seed}")
    program = program_on(layout, seed)
    own_loss, own = first_step(program, program.init(), batch)
    np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for ours, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * max(np.linalg.norm(theirs), 1e-3 * whole)
