"""A step of an engine takes as long as its weights or products, its requests' pages and its collectives."""

from dataclasses import replace

import pytest

from axon.chips import chips
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.nn.router import Routing
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.serving_steps import ROUTING, SHARE_OF_KERNEL, SHARE_OF_MEMORY, ServingSteps
from axon.precision import Precision
from axon.run import Serve, serving_program
from axon.serve.capacity import Capacity
from models.llama import Llama
from models.mixtral import Mixtral

LLAMA = Llama(vocab=1024, embed=256, layers=3, heads=8, kv_heads=4, mlp=512)
MATRICES = 3 * (2 * 256 * 8 * 32 + 2 * 256 * 4 * 32 + 3 * 256 * 512) + 256 * 1024
"""Of the layers, and the head."""
NORMS = 7 * 256


def steps(on, tensor=1, context=96, model=LLAMA):
    target, layout = Target.of(on, dict(chips())), Layout(mesh={"tensor": tensor} if tensor > 1 else {"data": 1})
    serve = Serve(model, layout, Precision("bfloat16"), capacity=Capacity(16, 4096, 256, 64))
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


def test_a_layer_of_experts_takes_time_besides_its_weights_which_a_kernel_reads():
    sizes = {"vocab": 1024, "embed": 256, "layers": 3, "heads": 8, "kv_heads": 4, "mlp": 512, "head_dim": 32}
    few, many = (steps("v6e:1x1", model=Mixtral(**sizes, routing=Routing(n, 2))) for n in (4, 12))
    parts = [one.parts(16, 16) for one in (few, many)]
    assert parts[0]["routing"] == parts[1]["routing"] == 3 * ROUTING
    assert "routing" not in steps("v6e:1x1").parts(16, 16)
    more = 3 * 8 * (3 * 256 * 512 + 256) * 2  # layers, experts, their matrices and the router's column, bytes
    expected = more / (few.target.chip.bandwidth * SHARE_OF_KERNEL)
    assert parts[1]["weights"] - parts[0]["weights"] == pytest.approx(expected, rel=0.02)
