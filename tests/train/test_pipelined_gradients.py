"""A pipeline's training is that of one device whatever the model is made of; `test_pipeline_parity.py` has the
schedules, and what else is split."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import Problem, check, once_each

from axon.errors import UserError
from axon.layout import Execution, Layout, LayoutError
from axon.nn import Auxiliary, Depth, Dropout, LanguageModel, RMSNorm, Rope, Segment
from axon.parallel.pipeline import GPipe, Interleaved, OneFOneB, TwoBW, ZeroBubbleV
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
FROZEN = replace(OPTIMIZER, groups=(Group("*/attention/*", frozen=True), Group("embedding/*", frozen=True)))


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
NOISY = Noisy(vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48)

PROBLEMS = {
    "tied": Problem(LLAMA, seq=SEQ, steps=1),
    "uneven": Problem(replace(LLAMA, layers=3), seq=SEQ, steps=1),
    "kinds": Problem(KINDS, seq=SEQ, steps=1),
    "segments": Problem(TWO_SEGMENTS, seq=SEQ, steps=1),
    "frozen": Problem(replace(LLAMA, layers=2, tied=False), optimizer=FROZEN, seq=SEQ, steps=1),
    "noisy": Problem(
        NOISY,
        NextToken(z_loss=0.1),
        seq=SEQ,
        steps=1,
        microbatches=4,  # its auxiliary loss is of each microbatch
        execution=Execution(remat="full"),
    ),
}


@pytest.fixture(scope="module")
def compare(packed_batch):
    """compare(problem, layout): a step of a pipeline beside that of one device, which is made once for all layouts."""
    expected = once_each(PROBLEMS, packed_batch)
    return lambda problem, layout: check(layout, expected(problem))


def described(layout):
    schedule = type(layout.schedule).__name__ if layout.schedule else "default"
    return f"{schedule}, {dict(layout.mesh)}, zero {layout.zero}, microbatches {layout.microbatches}"


@pytest.mark.full
def test_microbatches_may_be_fewer_than_stages(compare):
    compare("tied", Layout({"pipe": 4}, microbatches=2, schedule=OneFOneB()))


@pytest.mark.some(schedule=[ZeroBubbleV()])
@pytest.mark.full
@pytest.mark.parametrize("schedule", [None, ZeroBubbleV()], ids=str)
def test_dropout_auxiliary_losses_and_z_loss_are_those_of_one_device(schedule, compare):
    compare("noisy", Layout({"pipe": 2, "data": 2}, microbatches=4, schedule=schedule))


@pytest.mark.full
def test_a_segment_of_several_kinds_of_block_is_cut_between_its_periods(compare):
    compare("kinds", Layout({"pipe": 2, "tensor": 2}, microbatches=4))


@pytest.mark.full
def test_frozen_parameters_have_no_gradient(compare):
    compare("frozen", Layout({"pipe": 2}, microbatches=2))


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


def test_what_runs_is_said():
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


@pytest.mark.some(layout=UNEVEN[:1])
@pytest.mark.full
@pytest.mark.parametrize("layout", UNEVEN, ids=described)
def test_layers_that_do_not_divide_are_padded(layout, compare):
    """Three on two stages: with two chunks each, one of these has none."""
    compare("uneven", layout)


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


@pytest.mark.some(layout=UNEVEN[1:2])
@pytest.mark.full
@pytest.mark.parametrize("layout", UNEVEN, ids=described)
def test_segments_are_cut_anywhere_and_run_on_stages_that_do_not_store_them(layout, compare):
    """On the first of two stages the first block and two of the others, on the second one."""
    compare("segments", layout)
