"""PyTorch does the same work: the same loss, gradients and updates from the same parameters."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.nn import Llama3Scaling, Rope
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from scripts.bench.reference import MODEL, random_batch

torch = pytest.importorskip("torch", reason="torch is not installed: its CPU build is torch==2.13.0 on Python 3.11")

BATCH, SEQ = 3, 40
TINY = replace(MODEL, vocab=96, embed=48, layers=2, heads=6, kv_heads=6, mlp=80)
CASES = {
    "reference": TINY,
    "grouped and tied": replace(TINY, kv_heads=2, tied=True),
    "scaled rope": replace(TINY, rope=Rope(500.0, Llama3Scaling(original=16))),
}


@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_torch_has_the_same_losses_and_gradient_norms(model, seed):
    from scripts.bench.torch_llama import TorchStep

    optimizer = AdamW(Constant(1e-3), clip=0.5)
    program = Program(
        model, Layout(mesh={"data": 1}), optimizer, batch=BATCH, seq=SEQ, seed=seed, devices=jax.devices()[:1]
    )
    state = program.init()
    step = TorchStep(model, state.parameters, optimizer, compiled=False)
    for number in range(3):
        batch = random_batch(seed + number, BATCH, SEQ, model.vocab)
        placed = step.place(batch)
        step.loss(placed).backward()
        norm = np.sqrt(sum(float((p.grad**2).sum()) for p in step.model.parameters()))
        step.model.zero_grad()
        state, metrics = program.step(state, program.place(batch))
        np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=2e-5, err_msg=f"gradient norm of step {number}")
        np.testing.assert_allclose(step(placed), metrics["loss"], rtol=1e-5, err_msg=f"loss of step {number}")
