"""A pipeline's training is that of one device: losses, gradients, whatever the schedule and what else is split."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.errors import UserError
from axon.layout import Execution, Layout, LayoutError, sequence_parallel
from axon.nn import Auxiliary, Depth, Dropout, LanguageModel, RMSNorm, Rope, Segment
from axon.parallel.pipeline import DualPipeV, GPipe, Interleaved, OneFOneB, TwoBW, ZeroBubbleH1, ZeroBubbleV
from axon.plan.compiled import collectives
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant, Group
from axon.train.step import Program
from models.gemma import Gemma
from models.llama import Block, Llama

LLAMA = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
KINDS = Gemma(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    heads=4,
    kv_heads=2,
    mlp=48,
    head_dim=8,
    layers=4,
    window=9,
    local_rope=Rope(100.0),
    qk_norm=True,
)
SEQUENCES, SEQ = 16, 16
REDUCTIONS = ("all-reduce", "reduce-scatter", "all-to-all")
OPTIMIZER = AdamW(Constant(1e-3), clip=None)


@dataclass(frozen=True)
class Noisy(Llama):
    """Blocks with dropout, and an auxiliary loss that is not a sum over tokens; the head is not the embedding."""

    def build(self) -> LanguageModel:
        depth = Depth(Segment(self.layers, block=_NoisyBlock(self)))
        norm = RMSNorm("embed", self.dims)
        return LanguageModel(self.dims, depth, norm, tied=False, embedding_stddev=0.2, vocab=self.vocab)


class _NoisyBlock(nnx.Module):
    def __init__(self, config):
        self.block, self.dropout = Block(config), Dropout(0.2, "noise")

    def __call__(self, x, inputs, cache=None):
        y, cache, _ = self.block(x, inputs, cache)
        size = jnp.square(jnp.mean(jnp.square(y))) * y.shape[0]
        return self.dropout(y, inputs), cache, Auxiliary({"size": 0.3 * size})


@dataclass(frozen=True)
class TwoSegments(Llama):
    """Some blocks of one kind, then some of another."""

    segments: tuple[int, int] = (1, 3)

    def build(self) -> LanguageModel:
        first, second = self.segments
        depth = Depth(Segment(first, first=Block(self)), Segment(second, second=Block(self)))
        return LanguageModel(self.dims, depth, RMSNorm("embed", self.dims), tied=False, embedding_stddev=0.2)


TWO_SEGMENTS = TwoSegments(vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48)
NOISY = Noisy(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)


def gradients_and_metrics(program, state, batch):
    state, metrics = program.step(state, program.place(batch))
    moment = state.optimizer["direction"].mu  # after one step of Adam (1 − b1) of the gradient
    gradients = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER.b1), moment)
    return gradients, {name: float(metrics[name]) for name in metrics if name not in ("norms", "tokens")}


def compare(layout: Layout, packed_batch, model: Any = LLAMA, **options):
    """One step of a pipeline and of one device, from the same random start."""
    seed = random.getrandbits(31)
    batch = packed_batch(np.random.default_rng(seed), SEQUENCES, SEQ, model.vocab)
    options = {"optimizer": OPTIMIZER, "batch": SEQUENCES, "seq": SEQ, "seed": seed} | options
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    plain = Layout({"data": 1}, microbatches=layout.microbatches)
    one, ours = (
        Program(model, plain, devices=devices[:1], **options),
        Program(model, layout, devices=devices, **options),
    )
    expected, curve = gradients_and_metrics(one, one.init(), batch)
    found, our_curve = gradients_and_metrics(ours, ours.init(), batch)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(expected)))
    assert found.keys() == expected.keys()
    for path, one_gradient in jax.tree_util.tree_leaves_with_path(expected):
        gradient = found
        for key in path:
            gradient = gradient[key.key]
        gradient, padding = np.split(gradient, [len(one_gradient)])
        assert not np.any(padding), jax.tree_util.keystr(path)
        error = np.linalg.norm(gradient - one_gradient) / max(np.linalg.norm(one_gradient), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    for name, value in curve.items():
        np.testing.assert_allclose(our_curve[name], value, rtol=1e-5, err_msg=name)
    return ours


ALONE = [
    Layout({"pipe": 4}, microbatches=8),
    Layout({"pipe": 4}, microbatches=2, schedule=OneFOneB()),
    Layout({"pipe": 2}, microbatches=4, schedule=GPipe()),
    Layout({"pipe": 2}, microbatches=4, schedule=Interleaved()),
    Layout({"pipe": 4}, microbatches=4, schedule=ZeroBubbleH1()),
    Layout({"pipe": 2}, microbatches=4, schedule=ZeroBubbleV()),
    Layout({"pipe": 2}, microbatches=4, schedule=DualPipeV()),
]
TOGETHER = [
    Layout({"pipe": 4, "tensor": 2}, microbatches=4, zero=1),
    Layout({"pipe": 2, "data": 2, "tensor": 2}, microbatches=4, zero=1, schedule=Interleaved()),
    Layout({"pipe": 2, "data": 2}, microbatches=4, zero=2, schedule=ZeroBubbleV()),
    Layout({"pipe": 2, "data": 2, "tensor": 2}, microbatches=2, zero=3, rows=sequence_parallel()),
    Layout({"pipe": 2, "replica": 2, "data": 2}, microbatches=2, zero=3),
    Layout({"pipe": 2, "context": 2}, microbatches=2, schedule=ZeroBubbleH1()),
]


def described(layout):
    schedule = type(layout.schedule).__name__ if layout.schedule else "default"
    return f"{schedule}, {dict(layout.mesh)}, zero {layout.zero}, microbatches {layout.microbatches}"


@pytest.mark.full
@pytest.mark.parametrize("layout", ALONE, ids=described)
def test_a_schedule_trains_as_one_device_does(layout, packed_batch):
    compare(layout, packed_batch)


@pytest.mark.some(layout=[TOGETHER[1], *TOGETHER[3:]])
@pytest.mark.full
@pytest.mark.parametrize("layout", TOGETHER, ids=described)
def test_a_pipeline_goes_together_with_what_else_splits_arrays(layout, packed_batch):
    compare(layout, packed_batch)


@pytest.mark.some(schedule=[ZeroBubbleV()])
@pytest.mark.full
@pytest.mark.parametrize("schedule", [None, ZeroBubbleV()], ids=str)
def test_dropout_auxiliary_losses_and_z_loss_are_those_of_one_device(schedule, packed_batch):
    layout = Layout({"pipe": 2, "data": 2}, microbatches=4, schedule=schedule)
    model = replace(NOISY, layers=4) if schedule else NOISY
    compare(layout, packed_batch, model, objective=NextToken(z_loss=0.1), execution=Execution(remat="full"))


@pytest.mark.full
def test_a_segment_of_several_kinds_of_block_is_cut_between_its_periods(packed_batch):
    compare(Layout({"pipe": 2, "tensor": 2}, microbatches=4), packed_batch, KINDS)


@pytest.mark.full
def test_frozen_parameters_have_no_gradient(packed_batch):
    frozen = AdamW(
        Constant(1e-3), clip=None, groups=(Group("*/attention/*", frozen=True), Group("embedding/*", frozen=True))
    )
    model = Llama(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)
    compare(Layout({"pipe": 2}, microbatches=2), packed_batch, model, optimizer=frozen)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_are_summed_over_data_once_whatever_the_number_of_microbatches(zero):
    """What is sent over `data` in a loop are the sums of losses and counts; gradients are sent after the last one."""
    layout = Layout({"pipe": 2, "data": 2}, microbatches=4, zero=zero)
    program = Program(LLAMA, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, devices=jax.devices()[:4])
    sent = collectives(program.lower().compile().as_text())
    reduced = [one for one in sent if "data" in one.mesh_axes(layout.mesh) and one.kind in REDUCTIONS]
    assert all(one.bytes < 64 for one in reduced if one.times > 1)
    parameters = sum(4 * math.prod(spec.shape) for spec in program.parameters.values())
    assert sum(one.bytes for one in reduced if one.times == 1) >= parameters // 4


def test_what_runs_is_said(packed_batch):
    options = {"batch": SEQUENCES, "seq": SEQ, "devices": jax.devices()[:4]}
    program = Program(LLAMA, Layout({"pipe": 4}, microbatches=2), OPTIMIZER, **options)
    program.trace()
    assert program.choices["pipeline"].startswith("OneFOneB in lockstep: 4 stages, 2 microbatches, bubble 150%")
    assert "fewer microbatches than stages" in program.choices["pipeline"]


REFUSED = [
    (Layout({"pipe": 3}, microbatches=4), {}, "4 of a kind of layers do not divide into 3 stages"),
    (Layout({"pipe": 4}, schedule=Interleaved()), {}, "4 stages of 2 chunks each"),
    (Layout({"pipe": 2}, auto=True), {}, "Layout.auto"),
    (Layout({"pipe": 2}, microbatches=2, schedule=TwoBW()), {}, "without a flush: some .* Use 3 microbatches or more"),
    (Layout({"data": 2}, schedule=GPipe()), {}, "Layout.schedule = GPipe has no effect"),
]


@pytest.mark.parametrize(("layout", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_no_pipeline_can_do_is_refused_before_anything_is_traced(layout, options, message):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    with pytest.raises((UserError, LayoutError), match=message):
        Program(LLAMA, layout, OPTIMIZER, batch=12, seq=SEQ, devices=devices, **options)


UNEVEN = [
    Layout({"pipe": 2}, schedule=Interleaved(), microbatches=4, pad_layers=True),
    Layout({"pipe": 2, "data": 2}, schedule=OneFOneB(), microbatches=4, zero=1, pad_layers=True),
    Layout({"pipe": 2, "data": 2}, schedule=ZeroBubbleV(), microbatches=4, zero=3, pad_layers=True),
]


@pytest.mark.some(layout=UNEVEN[:2])
@pytest.mark.full
@pytest.mark.parametrize("layout", UNEVEN, ids=described)
def test_layers_that_do_not_divide_are_padded(layout, packed_batch):
    """Three on two stages: with two chunks each, one of these has none."""
    compare(layout, packed_batch, replace(LLAMA, layers=3))


def test_segments_that_leave_places_empty_need_a_permission():
    with pytest.raises(LayoutError, match=r"2 and 2 periods, cannot be cut into 2 equal chunks"):
        Program(
            replace(TWO_SEGMENTS, segments=(2, 2)),
            Layout({"pipe": 2}, microbatches=2),
            OPTIMIZER,
            batch=4,
            seq=8,
            devices=jax.devices()[:2],
        )


@pytest.mark.some(layout=UNEVEN[1:])
@pytest.mark.full
@pytest.mark.parametrize("layout", UNEVEN, ids=described)
def test_segments_are_cut_anywhere_and_run_on_stages_that_do_not_store_them(layout, packed_batch):
    """On the first of two stages the first block and two of the others, on the second one."""
    compare(layout, packed_batch, TWO_SEGMENTS)
