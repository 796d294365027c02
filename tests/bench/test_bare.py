"""The yardstick measures the same work: the bare step and the framework's do the same to the same parameters."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.train.optimizers import AdamW, Cosine
from axon.train.step import Program
from scripts.bench.bare import bare_state, make_step
from scripts.bench.reference import MODEL, random_batch

TINY = replace(MODEL, vocab=96, embed=48, layers=3, heads=6, kv_heads=6, mlp=80)
BATCH, SEQ = 4, 96
OPTIMIZER = AdamW(Cosine(1e-2, 2, 20), clip=0.5)


@pytest.mark.slow
def test_bare_and_framework_steps_have_the_same_losses_and_parameters(seed):
    program = Program(
        TINY, Layout(mesh={"data": 1}), OPTIMIZER, batch=BATCH, seq=SEQ, seed=seed, devices=jax.devices()[:1]
    )
    state = program.init()
    bare = bare_state(state.parameters, TINY)
    step = make_step(TINY, OPTIMIZER, BATCH, SEQ)
    for number in range(3):
        batch = program.place(random_batch(seed + number, BATCH, SEQ, TINY.vocab))
        state, made = program.step(state, batch)
        *bare, expected = step(*bare, batch)
        for name in ("loss", "grad_norm", "learning_rate"):
            np.testing.assert_allclose(made[name], expected[name], rtol=1e-5, err_msg=f"{name} of step {number}")
    # Adam divides by √v, so a gradient near zero leaves its sign to rounding: single elements may differ by a step's
    # length, an array as a whole by a thousandth of it.
    jax.tree.map(_close_on_the_whole, bare_state(state.parameters, TINY)[0], bare[0])


def _close_on_the_whole(one, other):
    assert np.mean(np.abs(np.asarray(one) - np.asarray(other))) < 1e-5
