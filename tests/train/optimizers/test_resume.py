"""An optimizer's state through a checkpoint."""

import jax
import numpy as np
import pytest

from axon.checkpoint import Checkpoints, Reader, Store
from axon.layout import Layout
from axon.train.optimizers import EMA, SOAP, Adafactor, AdamW, Constant, Group, Muon, ScheduleFreeAdamW
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=1, heads=2, kv_heads=2, mlp=32)
SEQUENCES, SEQ = 4, 8
RATE = Constant(1e-2)


def named(optimizer):
    return type(optimizer).__name__


OPTIMIZERS = [
    EMA(Adafactor(RATE, b1=0.9, moments="bfloat16"), decay=0.6),
    Muon(RATE, AdamW(RATE, groups=(Group("norm/*", frozen=True),)), moments="bfloat16"),
    SOAP(RATE, every=2),
    ScheduleFreeAdamW(RATE),
    AdamW(RATE, moments="dynamic8"),
    AdamW(RATE, moments="fp8"),
]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=named)
def test_a_restored_state_goes_on_bit_for_bit(optimizer, rng, packed_batch, random_parameters, tmp_path):
    program = Program(
        MODEL, Layout({"data": 2}, zero=2), optimizer, batch=SEQUENCES, seq=SEQ, devices=jax.devices()[:2]
    )
    batches = [program.place(packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)) for _ in range(4)]

    def steps(state, batches):
        for batch in batches:
            state, _ = program.step(state, batch)
        return state

    state = steps(program.init(random_parameters(program.runtime.module, rng)), batches[:2])
    with Store(tmp_path, Checkpoints(asynchronous=False)) as store:
        store.save(2, state, {})
    expected = jax.device_get(steps(state, batches[2:]))
    restored, _ = Reader(tmp_path).restore(program.abstract_state())
    made = jax.device_get(steps(restored, batches[2:]))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
