"""A step of an engine takes as long as its weights or products, its requests' pages and its collectives."""

from dataclasses import replace

import pytest

from axon.chips import chips
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.serving_steps import SHARE_OF_MEMORY, ServingSteps
from axon.precision import Precision
from axon.run import Serve, serving_program
from axon.serve.capacity import Capacity
from models.llama import Llama

LLAMA = Llama(vocab=1024, embed=256, layers=3, heads=8, kv_heads=4, mlp=512)
MATRICES = 3 * (2 * 256 * 8 * 32 + 2 * 256 * 4 * 32 + 3 * 256 * 512) + 256 * 1024
"""Of the layers, and the head."""
NORMS = 7 * 256


def steps(on, tensor=1, context=96):
    target, layout = Target.of(on, dict(chips())), Layout(mesh={"tensor": tensor} if tensor > 1 else {"data": 1})
    serve = Serve(LLAMA, layout, Precision("bfloat16"), capacity=Capacity(16, 4096, 256, 64))
    program = serving_program(serve, Placement.described(layout, tensor, target.platform))
    return ServingSteps(program, target, Bandwidths.of(target), context)


def test_parts_on_a_gpu_follow_from_sizes():
    one = steps("h100:1")
    chip = one.target.chip
    parts = one.parts(10, 10)
    assert parts["weights"] == pytest.approx(2 * (MATRICES + NORMS) / (chip.bandwidth * SHARE_OF_MEMORY))
    page_bytes = 10 * 96 * 3 * 2 * 4 * 32 * 2  # requests, tokens, layers, keys and values, heads, their width, bytes
    assert parts["attention"] == pytest.approx(page_bytes / chip.bandwidth)
    assert parts["collectives"] == 0
    flops = 4096 * 2 * (MATRICES - 256 * 1024) + 128 * 2 * 256 * 1024
    attention = 4096 * 3 * 4 * 8 * 32 * 96
    many = one.parts(3000, 10)["products"]  # in the size of 4,096, with 128 rows of logits
    assert many == pytest.approx((flops + attention) / (chip.peak * chip.sustained), rel=0.02)


def test_split_weights_are_read_in_less_time_and_summed_twice_a_layer_and_after_the_table():
    one, two = steps("h100:2"), steps("h100:2", tensor=2)
    assert two.parts(16, 16)["attention"] == pytest.approx(one.parts(16, 16)["attention"] / 2)
    assert two.parts(16, 16)["weights"] < 0.52 * one.parts(16, 16)["weights"]
    links = replace(two.bandwidths, latency=1e-3)  # so that steps of a collective are counted: a reduce has two
    slow = replace(two, bandwidths=links).parts(16, 16)["collectives"]
    assert slow == pytest.approx((2 * (2 * 3 + 1) + 1) * 1e-3, rel=0.01)


def test_attention_on_a_tpu_is_that_of_its_recorded_kernels_and_linear_in_requests():
    one = steps("v6e:1x1")
    assert one.parts(16, 16)["attention"] == pytest.approx(16 * one.parts(16, 1)["attention"])
    pages = 16 * 96 * 3 * 2 * 4 * 32 * 2 / one.target.chip.bandwidth
    assert one.parts(16, 16)["attention"] > pages
