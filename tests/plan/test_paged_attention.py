"""Attention over pages takes as long as its bytes or as its instructions, whichever is longer."""

from dataclasses import replace

import pytest

from axon.chips import KERNEL_CHIPS
from axon.layout import Layout, Placement
from axon.plan.paged_attention import attention_time
from axon.run import Serve, serving_program
from axon.serve.capacity import Capacity
from models.gemma import Gemma
from models.llama import Llama

LLAMA = Llama(vocab=1024, embed=4096, layers=2, heads=32, kv_heads=8, mlp=1024)
CAPACITY = Capacity(requests=64, length=4096)


def program(model=LLAMA, devices=1, **capacity):
    layout = Layout(mesh={"tensor": devices})
    placement = Placement.described(layout, devices, "tpu")
    serve = Serve(model, layout, weights="bfloat16", capacity=replace(CAPACITY, **capacity))
    return serving_program(replace(serve, precision=replace(serve.precision, compute="bfloat16")), placement)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_pages_of_8_heads_are_bound_by_memory_and_split_pages_of_few_tokens_by_instructions(chip):
    whole = attention_time(program(), chip)
    bytes_read = 2 * 64 * 2048 * 2 * 8 * 128 * 2  # layers, requests, positions, keys and values
    assert whole.memory == pytest.approx(bytes_read / KERNEL_CHIPS[chip].bandwidth, rel=1e-6)
    assert whole.total == whole.memory + whole.write
    assert whole.compute > whole.memory / 4
    split = attention_time(program(devices=8, page_size=16), chip)
    assert split.memory == pytest.approx(whole.memory / 8)
    assert split.compute > split.memory
    assert split.total == split.compute + split.write


def test_requests_that_half_fill_less_than_the_pages_have_are_shorter_and_windows_shorter_still():
    whole, short = (attention_time(program(cache_tokens=tokens), "v6e") for tokens in (None, 64 * 1024))
    assert short.memory == pytest.approx(whole.memory / 2)
    windowed = replace(LLAMA, window=512)
    assert 0 < attention_time(program(windowed), "v6e").memory <= whole.memory / 4
    both = Gemma(1024, 2048, 12, 8, 4, 1024, 256, window=512)
    assert attention_time(program(both), "v6e").compute > 0
