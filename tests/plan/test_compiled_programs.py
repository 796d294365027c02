"""Training steps of a real model, compiled for machines that are not here: do they fit, and what do they send?

Nothing is computed, and no array of the model's size is made. Rows are short, but for one slow case: without an
attention kernel of their own, compilers take long for long rows.
"""

import math
from dataclasses import replace

import jax
import pytest

from axon.layout import Execution, Layout
from axon.plan.compiled import collectives, count_instructions, device_bytes
from axon.plan.topology import devices
from axon.train.step import Program
from scripts.bench.reference import LLAMA3_8B, OPTIMIZER

TOKENS = 16 * 2048
V5E_MEMORY = 16 * 2**30
H200_MEMORY = 141e9


def step(layers, layout, batch, seq, devices):
    execution = Execution(remat="full", unroll=False)
    model = replace(LLAMA3_8B, layers=layers)
    return Program(model, layout, OPTIMIZER, batch=batch, seq=seq, execution=execution, devices=devices)


def v5e_step(layers, seq=256):
    """FSDP over 16 TPU v5e."""
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    return step(layers, Layout(mesh={"data": 16}, zero=3), TOKENS // seq, seq, devices("v5e:4x4"))


def h200_step(layers, seq=256):
    """FSDP 4 × tensor 2 on 8 H200."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    return step(layers, Layout(mesh={"data": 4, "tensor": 2}, zero=3), TOKENS // seq, seq, devices("h200:8"))


def cpu_step(layers, seq=256):
    """One CPU, its layers scanned as an accelerator's are."""
    return step(layers, Layout(mesh={"data": 1}), 1, seq, jax.devices()[:1])


def matrix_sizes(program):
    """Elements of each matrix of one layer."""
    shapes = [spec.shape[1:] for spec in program.parameters.values() if spec.axes[0] == "layers"]
    return {math.prod(shape) for shape in shapes if len(shape) > 1}


def table_size(program):
    """Elements of the embedding, and of the head."""
    return program.module.dims["vocab"] * program.module.dims["embed"]


def sent(compiled):
    """Kind of collective → (dtype, elements) of every array that it makes."""
    made = {}
    for one in collectives(compiled.as_text()):
        made.setdefault(one.kind, set()).update((dtype, math.prod(shape)) for dtype, shape in one.arrays)
    return made


def largest_all_reduce(compiled):
    """Bytes."""
    return max(one.bytes for one in collectives(compiled.as_text()) if one.kind == "all-reduce")


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_deep_llama_lowers_to_as_many_operations_as_a_shallow_one_on_tpus():
    counts = {layers: v5e_step(layers).lower().as_text().count(" = ") for layers in (8, 32)}
    assert counts[8] == counts[32] > 1000


@pytest.mark.full
def test_a_deep_llama_compiles_to_as_many_operations_as_a_shallow_one():
    counts = {layers: count_instructions(cpu_step(layers).lower().compile().as_text()) for layers in (8, 32)}
    assert counts[8] == counts[32] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seq", [256, 2048])
def test_fsdp_on_v5e_fits_gathers_each_layers_weights_and_sums_their_gradients_in_rings(seq):
    program = v5e_step(layers=4, seq=seq)
    compiled = program.lower().compile()
    assert device_bytes(compiled) < 0.6 * V5E_MEMORY
    kinds = sent(compiled)
    assert set(kinds) == {"all-gather", "collective-permute", "all-reduce", "all-to-all"}
    assert {("bf16", size) for size in matrix_sizes(program)} <= kinds["all-gather"]
    assert {("f32", size // 16) for size in matrix_sizes(program)} == kinds["collective-permute"]
    # Embedding and head have more rows than a device has tokens: they stay apart, and the tokens' vectors travel.
    vectors = TOKENS * program.module.dims["embed"]
    assert {("bf16", vectors // 16), ("f32", table_size(program) // 16)} <= kinds["all-to-all"]
    assert max(size for _, size in kinds["all-gather"]) == vectors < table_size(program)
    # What the head's columns owe the tokens, summed in float32; the rest is small.
    assert largest_all_reduce(compiled) == 4 * vectors


@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_on_gpus_fits_and_sends_weights_gradients_and_activations():
    program = h200_step(layers=4)
    compiled = program.lower().compile()
    assert device_bytes(compiled) < 0.1 * H200_MEMORY
    kinds = sent(compiled)
    assert set(kinds) == {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert {("bf16", size // 2) for size in matrix_sizes(program)} <= kinds["all-gather"]
    assert {("f32", table_size(program) // 8)} <= kinds["all-to-all"]
    assert {("f32", size // 8) for size in matrix_sizes(program)} <= kinds["reduce-scatter"]
    residual = TOKENS // 4 * program.module.dims["embed"]
    assert ("bf16", residual) in kinds["all-reduce"]  # what tensor parallelism sums
    assert largest_all_reduce(compiled) == 4 * residual  # float32: what the head's columns owe the tokens
