"""PipeDream-2BW, a pipeline without a flush: each step applies the gradients of the batch before, taken at the weights
that it began with, and nothing else is different from one device."""

import math
import secrets
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.parallel.pipeline import OneFOneB, TwoBW
from axon.train.objective import SEQUENCES as NUMBERS
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant, Cosine, Group
from axon.train.step import Program
from axon.train.update import clipped, metrics
from models.llama import Llama

MODEL = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
SEQUENCES, SEQ, MICROBATCHES, STEPS = 16, 16, 8, 4
OPTIMIZER = AdamW(Cosine(peak=1e-2, warmup=2, steps=STEPS + 3), clip=0.5, weight_decay=0.1, eps=1e-3)


def layout_of(mesh: dict[str, int], **fields: Any) -> Layout:
    return Layout(mesh, microbatches=MICROBATCHES, schedule=TwoBW(), **fields)


def programs(layout: Layout, model: Any = MODEL, optimizer: Any = OPTIMIZER, z_loss: float = 0.1):
    """The pipelined program, and that of one device, of one seed; and batches with different numbers of tokens."""
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    options = {"batch": SEQUENCES, "seq": SEQ, "seed": seed, "objective": NextToken(z_loss=z_loss)}
    plain, devices = Layout({"data": 1}, microbatches=MICROBATCHES), jax.devices()
    one = Program(model, plain, optimizer, devices=devices[:1], **options)
    return Program(model, layout, optimizer, devices=devices[: math.prod(layout.mesh.values())], **options), one, seed


def batches(packed_batch, seed: int, count: int = STEPS, vocab: int = MODEL.vocab) -> list[Any]:
    rng = np.random.default_rng(seed)
    made = [packed_batch(rng, SEQUENCES, SEQ, vocab) for _ in range(count)]
    assert len({batch["weights"].sum() for batch in made}) > 1
    return made


def delayed(program: Program, batches: list[Any]):
    """The states and metrics of training on one device by gradients that come one step late."""

    def step(state, began, batch):
        batch = {**batch, NUMBERS: jnp.arange(SEQUENCES, dtype=jnp.int32)}
        counts = program.gradients.counts(batch)
        found, sums = program.gradients(began, batch, counts)
        found, norms = clipped(found, OPTIMIZER.clip)
        return program.update.applied(state, found), metrics(OPTIMIZER.schedule, began, sums, counts, norms)

    compiled = program.runtime.jit(step)
    state, began, curve = program.init(), [], []
    states = [state]
    for number, batch in enumerate(batches):
        began.append(replace(state, step=jnp.int32(number)))
        if number:
            with program.runtime.tracing():
                state, reported = compiled(state, began[number - 1], program.place(batches[number - 1]))
            curve.append(reported)
        states.append(state)
    return states, curve


def host(tree: Any) -> Any:
    return jax.device_get(tree)


def compare(layout: Layout, packed_batch, model: Any = MODEL) -> None:
    ours, one, seed = programs(layout, model)
    given = batches(packed_batch, seed)
    states, curve = delayed(one, given)
    state = ours.init()
    start = host((state.parameters, state.optimizer))
    for number, batch in enumerate(given):
        state, found = ours.step(state, ours.place(batch))
        assert int(state.step) == number + 1
        if number == 0:
            jax.tree.map(np.testing.assert_array_equal, host((state.parameters, state.optimizer)), start)
            assert all(np.all(np.asarray(value) == 0) for value in found.values())
            continue
        for name, value in curve[number - 1].items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-7, err_msg=name)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
            host(state.parameters),
            host(states[number + 1].parameters),
        )


LAYOUTS = {
    "2 stages": layout_of({"pipe": 2}),
    "4 stages": layout_of({"pipe": 4}),
    "ZeRO-1": layout_of({"pipe": 2, "data": 2}, zero=1),
    "ZeRO-3": layout_of({"pipe": 2, "data": 2}, zero=3),
    "tensor": layout_of({"pipe": 2, "tensor": 2}),
    "sequence and ZeRO-2": layout_of({"pipe": 2, "data": 2, "tensor": 2}, zero=2, rows=sequence_parallel()),
}


@pytest.mark.few(name=("2 stages",))
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_step_applies_the_gradients_of_the_batch_before_at_the_weights_it_began_with(name, packed_batch):
    compare(LAYOUTS[name], packed_batch)
