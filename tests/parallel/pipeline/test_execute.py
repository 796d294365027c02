"""Every schedule gives the gradients of the model run whole, which autodiff makes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec, reshard

from axon import axes
from axon.layout import Layout, Placement
from axon.parallel.pipeline import (
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    lockstep,
)
from axon.parallel.pipeline.execute import Parts, execute, execute_period, in_flight
from axon.parallel.pipeline.partition import NOTHING, partition

BATCH, EMBED, EACH = 4, 3, 2
"""Sequences of a microbatch on a device, width, layers of a chunk."""

SCHEDULES = [
    (GPipe(), 2, 3),
    (OneFOneB(), 4, 5),
    (OneFOneB(), 3, 2),
    (Interleaved(2), 2, 4),
    (Interleaved(3), 2, 3),
    (ZeroBubbleH1(), 4, 4),
    (ZeroBubbleV(), 2, 5),
    (DualPipeV(), 3, 6),
]


def layer(weight, scale, x, factor):
    """One layer, and something that it adds to the loss besides."""
    y = x + jnp.tanh(x * scale @ weight) * factor[:, None]
    return y, jnp.sum(jnp.square(y)) / y.size


def chunk(trained, fixed, numbers, x, inputs, extras):
    sizes = []
    for weight, scale, number in zip(trained, fixed, numbers, strict=True):
        y, more = layer(weight, scale, x, inputs)
        x = jnp.where(number == NOTHING, x, y)
        sizes.append(jnp.where(number == NOTHING, 0, more))
    return (x, {"size": sum(sizes)}, {"of layer": jnp.stack(sizes)}) if extras else (x, {}, {})


def example(rng, layers, microbatches, batch):
    """Weights and a fixed scale of each layer, a first and a last matrix, and data with the axis `micro` in front."""
    shapes = [(layers, EMBED, EMBED), (layers,), (EMBED, EMBED), (EMBED, EMBED)]
    shapes += [(microbatches, batch, EMBED), (microbatches, batch)]
    return [rng.normal(size=shape, scale=0.5).astype(np.float32) for shape in shapes]  # more would amplify rounding


def parts(trained, fixed, first, last, x, factors, extras):
    def before(outer, number):
        return lax.dynamic_index_in_dim(x, number, keepdims=False) @ outer[0]

    def after(outer, y, more, number):
        logits = jnp.tanh(y @ outer[1] @ outer[0])  # the first matrix again: tied
        loss = jnp.sum(logits**2) * (1 + number) + 0.1 * sum(more.values(), jnp.zeros(()))
        return loss, {"loss": loss}

    def run(trained, fixed, reports, numbers, x, inputs, active):
        (trained,), (fixed,), (numbers,) = trained, fixed, numbers
        y, more, statistics = chunk(trained, fixed, numbers, x, inputs, extras)
        return jnp.where(active, y, jnp.nan), more, [statistics]  # what an idle stage makes is for nobody

    return Parts(before, run, after, [trained], [fixed], (first, last), factors, [], [{}])


@partial(jax.jit, static_argnames="extras")
def whole(trained, fixed, first, last, x, factors, extras):
    """The same, without a pipeline: gradients of the sum, and the sum."""

    def loss(trained, outer):
        of = parts(trained, fixed, *outer, x, factors, extras)

        def of_microbatch(number):
            numbers = np.arange(len(trained))
            x_of_first = of.first(outer, number)
            y, more, statistics = of.chunk([trained], [fixed], [{}], [numbers], x_of_first, factors[number], True)
            return of.last(outer, y, more, number)[0], statistics

        losses, found = lax.map(of_microbatch, jnp.arange(len(x)))
        return jnp.sum(losses), jax.tree.map(lambda each: jnp.sum(each, axis=0), found)

    differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (total, statistics), (gradient, outer) = differentiated(trained, (first, last))
    return gradient, outer, total, statistics


def compare(schedule, stages, microbatches, rng, data=1, extras=False, missing=0):
    table = lockstep(schedule.table(stages, microbatches))
    check(table)
    layers = table.chunks.total * EACH - missing
    stored = -(-layers // stages) * stages
    given = example(rng, layers, microbatches, BATCH * data)
    placement = Placement.of(Layout({"pipe": stages, "data": data}), jax.devices()[: stages * data])
    apart = ("data",) if data > 1 else ()

    def run(trained, fixed, first, last, x, factors):
        padded = (jnp.concatenate([v, jnp.zeros((stored - layers, *v.shape[1:]))]) for v in (trained, fixed))
        trained, fixed = (reshard(v, PartitionSpec("pipe")) for v in padded)
        x, factors = (reshard(v, PartitionSpec(None, apart or None)) for v in (x, factors))
        first, last = (reshard(v, PartitionSpec(reduced=frozenset(apart))) for v in (first, last))
        of = parts(trained, fixed, first, last, x, factors, extras)
        of = replace(of, partition=partition([layers], [1.0], table.chunks.total))
        (found,), outer, sums, (statistics,), _ = execute(table, of, apart)
        found, statistics = reshard((found, statistics), PartitionSpec("pipe"))
        found, statistics = jax.tree.map(lambda v: reshard(v, PartitionSpec())[:layers], (found, statistics))
        return found, jax.tree.map(lambda g: reshard(g, PartitionSpec()), outer), sums["loss"], statistics

    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        found = jax.device_get(jax.jit(run)(*given))
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(whole(*given, extras)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.full
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_gradients_are_those_of_the_whole_model(case, rng):
    compare(*case, rng)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in SCHEDULES if case[1] <= 4], ids=str)
def test_gradients_are_those_of_the_whole_model_with_data_parallelism(case, rng):
    compare(*case, rng, data=2)


@pytest.mark.full
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_what_chunks_add_up_on_the_way_reaches_the_loss_and_its_gradient_comes_back(case, rng):
    compare(*case, rng, extras=True)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("case", [SCHEDULES[1], SCHEDULES[3], SCHEDULES[6]], ids=str)
def test_layers_need_not_be_as_many_on_every_stage(case, rng):
    compare(*case, rng, extras=True, missing=3)


ENDLESS = [
    (TwoBW(), 2, 3),
    (TwoBW(), 4, 8),
    (Interleaved(2), 2, 4),
    (ZeroBubbleH1(), 2, 4),
    (ZeroBubbleV(), 2, 6),
]
"""Without a flush: any table may be one period of a schedule that goes on."""


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(extras=(True,))
@pytest.mark.parametrize("extras", [True, False])
@pytest.mark.parametrize("case", ENDLESS, ids=str)
def test_without_a_flush_a_batch_is_finished_in_the_next_period_with_the_weights_that_it_began_with(case, extras, rng):
    """Three batches, each with its own weights and data, one begun in each period; the fourth period ends the last."""
    schedule, stages, microbatches = case
    table = lockstep(replace(schedule.table(stages, microbatches), flush=False))
    check(table)
    layers = table.chunks.total * EACH
    batches = [example(rng, layers, microbatches, BATCH) for _ in range(3)]
    placement = Placement.of(Layout({"pipe": stages}), jax.devices()[:stages])

    def of(trained, fixed, first, last, x, factors):
        trained, fixed = (reshard(v, PartitionSpec("pipe")) for v in (trained, fixed))
        first, last, x, factors = (reshard(v, PartitionSpec()) for v in (first, last, x, factors))
        made = parts(trained, fixed, first, last, x, factors, extras)
        return replace(made, partition=partition([layers], [1.0], table.chunks.total))

    @jax.jit
    def period(begun, before, memory):
        return execute_period(table, of(*begun), of(*before), memory)

    def results(found):
        (trained,), outer, sums, (statistics,), _ = found
        return trained, outer, sums["loss"], statistics

    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        memory, *_ = jax.jit(lambda given: in_flight(table, of(*given)))(batches[0])
        before, finished = jax.tree.map(lambda x: np.full_like(x, np.nan), batches[0]), []
        for begun in (*batches, batches[0]):
            first, last, memory = period(begun, before, memory)
            finished.append(jax.device_get((results(first), results(last))))
            before = begun
    for number, given in enumerate(batches):
        found = jax.tree.map(np.add, finished[number][0], finished[number + 1][1])
        for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(whole(*given, extras)), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
