"""Frozen parameters in a whole step: they stay, and their gradients are not computed."""

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.runtime import flattened
from axon.train.optimizers import AdamW, Constant, Group
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=2, heads=4, kv_heads=4, mlp=48)
SEQUENCES, SEQ = 8, 16


def program(*groups, layout=Layout({"data": 1}), devices=1):
    optimizer = AdamW(Constant(1e-2), groups=groups)
    return Program(MODEL, layout, optimizer, batch=SEQUENCES, seq=SEQ, devices=jax.devices()[:devices])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "devices"),
    [(Layout({"data": 2, "tensor": 2}, zero=3, microbatches=2), 4), (Layout({"data": 2}, zero=1, auto=True), 2)],
    ids=["zero 3", "auto"],
)
def test_frozen_parameters_keep_their_bits_and_the_others_learn(layout, devices, rng, packed_batch):
    frozen = program(Group("layers/*/mlp/*", frozen=True), layout=layout, devices=devices)
    state = frozen.init()
    before = flattened(jax.device_get(state.parameters))
    for _ in range(3):
        state, metrics = frozen.step(state, frozen.place(packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)))
    norms = dict(zip(frozen.parameters, np.asarray(metrics["norms"]), strict=True))
    for path, value in flattened(jax.device_get(state.parameters)).items():
        assert (value.tobytes() == before[path].tobytes()) == ("/mlp/" in path), path
        assert (norms[path] == 0) == ("/mlp/" in path), path


@pytest.mark.full
def test_no_gradient_of_a_frozen_matrix_is_computed():
    """Of 6 FLOPs a token and parameter, the 2 of the weight's gradient are gone; of all of them, the backward is."""
    whole, some, all_but_norm = (
        program(*groups).lower().compile().cost_analysis()["flops"]
        for groups in ((), (Group("layers/*/mlp/*", frozen=True),), (Group("norm/*"), Group("*", frozen=True)))
    )
    tokens, mlp = SEQUENCES * SEQ, 3 * 2 * 32 * 48
    every = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * 64
    assert whole - some >= 2 * tokens * mlp
    assert whole - all_but_norm >= 4 * tokens * (every - 32 * 64) + 2 * tokens * 32 * 64
