"""What the lines of a step are made of."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.predict.explained import explained
from axon.plan.predict.links import Bandwidths, Links
from axon.plan.predict.memory import memory
from axon.plan.predict.seconds import GRADIENTS, INPUT, SAVES, TENSOR, UPDATE_PRODUCTS, WEIGHTS, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.search import Plan
from axon.show.plan_why import why
from axon.train.optimizers import AdamW, Constant, Muon
from axon.train.optimizers.newton_schulz import orthogonalize_flops

STREAM = {"seq.residual": ("context", "tensor")}


def on(name):
    return Target.of(name, dict(CHIPS))


@pytest.fixture(scope="module")
def shards():
    work = Work.of(program(platform="gpu", vocab=4096, embed=1024, mlp=4096, heads=8, head_dim=128))
    layout = Layout({"data": 4, "tensor": 8}, STREAM, zero=3)
    return Shards(Split(work, Placement.described(layout, 32, "gpu")), layout, Execution(remat="none"))


@given(
    st.sampled_from(["h100:4x8", "h100:1x8", "v5p:4x4x4", "2*v5e:4x4"]),
    st.floats(1, 1e10),
    st.floats(1e9, 1e12),
    st.sampled_from([("data",), ("tensor",), ("data", "tensor")]),
)
def test_a_gather_takes_what_its_fastest_algorithm_takes(name, size, network, mesh_axes):
    target = on(name)
    rates = replace(Bandwidths.of(target), network=network)
    links = Links(target, {"data": target.devices // 8, "tensor": 8}, rates)
    near, far = links.group(mesh_axes)
    if near * far > 1:
        every = links.algorithms(mesh_axes, size)
        assert links.gather(mesh_axes, size) == min(every.values()) == every[links.algorithm(mesh_axes, size)]
    if near > 1 and far > 1 and network < links.bandwidths.link / near:
        assert links.algorithm(mesh_axes, size) == "hierarchical"


def test_a_line_has_the_bytes_that_a_device_sends_and_the_axes_that_it_is_for(shards):
    target = on("h100:4x8")
    own, plain = explained(shards, target), seconds(shards, target)
    assert [(one.name, one.seconds, one.hidden) for one in own.lines] == [
        (one.name, one.seconds, one.hidden) for one in plain.lines
    ]
    lines = {one.name: one for one in own.lines}
    stream, layers = 32 * 128 / 4 * 1024 * 2, 4
    assert lines[TENSOR].bytes == pytest.approx(layers * 2 * 5 * 7 / 8 * stream)
    assert (lines[TENSOR].algorithm, lines[WEIGHTS].algorithm) == ("tree", "tree")
    assert {"heads", "mlp", "vocab"} <= set(lines[TENSOR].axes)
    assert {"batch", "embed"} <= set(lines[WEIGHTS].axes)
    assert lines[WEIGHTS].behind
    assert lines[TENSOR].latency == pytest.approx(layers * 2 * 5 * math.log2(8) * 5e-6)


def test_lines_of_gradients_across_hosts_are_hierarchical(shards):
    layout = Layout({"data": 32}, zero=1)
    split = Split(shards.split.work, Placement.described(layout, 32, "gpu"))
    line = next(
        one for one in explained(Shards(split, layout, Execution()), on("h100:4x8")).lines if one.name == GRADIENTS
    )
    assert line.algorithm == "hierarchical"


def test_batches_from_the_host_are_hidden_and_checkpoints_are_shared_by_the_steps_between_them(shards):
    target = on("h100:4x8")
    rates = Bandwidths.of(target)
    plain, step = seconds(shards, target), seconds(shards, target, saved_every=50)
    lines = {one.name: one for one in step.lines}
    assert lines[INPUT].seconds == pytest.approx(8 * 32 * 128 / 4 / rates.host)
    assert lines[INPUT].exposed == 0
    state = sum(shards.split.state.values())
    assert lines[SAVES].exposed == pytest.approx(state / rates.host / 50)
    assert step.total - plain.total == pytest.approx(lines[SAVES].exposed)


def test_products_of_an_update_take_time_of_their_own(shards):
    muon = Muon(Constant(1e-3), AdamW(Constant(1e-3)))
    sizes = {"vocab": 4096, "embed": 1024, "mlp": 4096, "heads": 8, "head_dim": 128}
    work = Work.of(program(platform="gpu", optimizer=muon, **sizes))
    target = on("h100:4x8")

    def line(zero):
        layout = replace(shards.layout, zero=zero)
        split = Split(work, Placement.described(layout, 32, "gpu"))
        return seconds(Shards(split, layout, Execution()), target).of(UPDATE_PRODUCTS)

    matrices = [*3 * [(1024, 4096)], *2 * [(1024, 1024)], *2 * [(1024, 512)]]
    flops = 4 * sum(orthogonalize_flops(*one, muon.steps) for one in matrices)
    rate = target.chip.peak * target.chip.sustained
    assert line(0) == pytest.approx(flops / 8 / rate)
    assert line(1) == pytest.approx(line(0) / 4)
    assert seconds(shards, target).of(UPDATE_PRODUCTS) == 0


def test_a_plan_is_explained_from_the_peak_to_its_mfu(shards):
    target = on("h100:4x8")
    step = explained(shards, target)
    plan = Plan(shards.layout, shards.execution, memory(shards), step)
    first, products, *others = why(plan, target)
    assert f"{step.mfu:.1%}" in first
    assert "100 %" in first
    told = [float(one.rpartition(": ")[2].rstrip("%")) for one in (products, *others) if one.endswith("%")]
    assert told == sorted(told, reverse=True)
    assert told[-1] == pytest.approx(100 * step.mfu, abs=0.5)
    assert any("along tensor 8, which splits" in one and "mlp" in one for one in others)
