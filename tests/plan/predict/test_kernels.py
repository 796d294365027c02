"""Seconds of a step's Pallas kernels, from the record of their tiles."""

from dataclasses import replace
from typing import Any

import pytest
from planning import mixture, program

from axon.axes import Execution
from axon.axes.execution import Remat
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.bundles import recorded
from axon.plan.predict.kernels import ExpertsWork, Kernels
from axon.plan.predict.seconds import ELEMENTWISE, PASSES, PRODUCTS, REPEATED, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work

RECORDED = ("v5e", "v5p", "v6e")


def tile_seconds(chip, name, flops):
    """Seconds of so many FLOPs in tiles that a chip's cores share: of their bundles, or of what its units sustain."""
    part = recorded()[name]
    cycles = flops / part["flops"] * part["bundles"][chip.name] / chip.cores
    return max(cycles / chip.clock, flops / (chip.peak * chip.sustained))


def step(work: Work, on: str, remat: Remat = "full", **fields: Any):
    layout, target = Layout(**fields), Target.of(on, dict(CHIPS))
    split = Split(work, Placement.described(layout, target.devices, target.platform))
    return seconds(Shards(split, layout, Execution(remat=remat)), target)


@pytest.mark.parametrize("name", RECORDED)
def test_attention_takes_its_tiles_and_five_products_in_the_backward(name, rng):
    chip = replace(CHIPS[name], sustained=float(rng.uniform(0.3, 1)))
    flops = float(rng.uniform(1e12, 1e15))
    forward, backward = Kernels(chip).attention(flops)
    assert forward == pytest.approx(tile_seconds(chip, "attention: forward, whole tile", flops))
    assert backward == pytest.approx(tile_seconds(chip, "attention: backward, whole tile", 2.5 * flops))


@pytest.mark.parametrize("name", RECORDED)
def test_experts_take_their_tiles_and_what_ends_in_part_of_one(name, rng):
    chip, flops, rows = CHIPS[name], float(rng.uniform(1e12, 1e15)), float(rng.uniform(1e4, 1e6))
    parts = [f"grouped_matmul: {one}, tile" for one in ("product", "gradient of rows", "gradient of weights")]
    for groups in (0, int(rng.integers(1, 64))):
        forward, backward = Kernels(chip).experts(ExpertsWork(flops, rows, groups, 0.0))
        whole = flops * (1 + 128 * groups / rows)
        assert forward == pytest.approx(tile_seconds(chip, parts[0], whole))
        assert backward == pytest.approx(sum(tile_seconds(chip, part, whole) for part in parts[1:]))


def test_experts_with_few_rows_take_as_long_as_their_weights(rng):
    size = float(rng.uniform(1e9, 1e10))
    forward, backward = Kernels(CHIPS["v5p"]).experts(ExpertsWork(1e6, 8, 8, size))
    assert backward == 2 * forward == pytest.approx(2 * size / CHIPS["v5p"].bandwidth)


@pytest.mark.parametrize("name", ["h100", "v4"])
def test_kernels_that_are_not_recorded_take_as_long_as_products(name, rng):
    chip, flops = CHIPS[name], float(rng.uniform(1e12, 1e15))
    once = flops / (chip.peak * chip.sustained)
    assert Kernels(chip).attention(flops) == pytest.approx((once, 2 * once))
    assert Kernels(chip).experts(ExpertsWork(flops, 100, 7, 1e12)) == pytest.approx((once, 2 * once))


@pytest.mark.full
@pytest.mark.draws(1)
def test_remat_repeats_attention_unless_it_is_kept():
    policies = ("none", "full", ("attention",))
    work = Work.of(program(seq=2048, batch=8, head_dim=128))
    found = {remat: step(work, "v6e:1x1", remat, mesh={"data": 1}) for remat in policies}
    (period,) = work.periods
    attention, _ = Kernels(CHIPS["v6e"]).attention(8 * 2048 * period.times * period.attention)
    saved = found["full"].of(REPEATED) - found[("attention",)].of(REPEATED)
    assert saved == pytest.approx(attention, rel=0.2)  # its mask of documents, and the product after it
    assert found["none"].of(REPEATED) == 0
    assert len({one.of(PRODUCTS) for one in found.values()}) == 1


def test_a_ring_moves_more_the_more_steps_it_has():
    work = Work.of(program(seq=1024))
    moved = [
        step(work, "v5p:2x2x2", mesh={"data": 8 // n, "context": n}, context="ring" if n > 1 else None).of(ELEMENTWISE)
        for n in (1, 2, 4, 8)
    ]
    assert moved[2] - moved[1] == pytest.approx(moved[1] - moved[0])
    assert moved[3] - moved[2] == pytest.approx(2 * (moved[2] - moved[1]))


@pytest.mark.full
@pytest.mark.draws(1)
def test_rows_that_are_sent_are_put_in_order_twice_as_often():
    work = Work.of(mixture())
    dense = Work.of(mixture()).periods[0]
    own, sent = (step(work, "v5p:2x2x1", mesh=mesh).of(ELEMENTWISE) for mesh in ({"data": 4}, {"expert": 4}))
    copies = 32 * 128 / 4 * 2 * 64 * 2 * 4 * (2 + dense.under("full").repeated / 2) * dense.times
    empty = (Execution().capacity_factor - 1) * sum(dense.none.kept.rows.values())  # rows of a buffer without a copy
    empty *= PASSES * 32 * 128 / 4 * dense.times
    assert sent - own == pytest.approx((copies / 0.2 + empty) / CHIPS["v5p"].bandwidth)
