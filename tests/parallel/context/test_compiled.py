"""Attention over split positions, compiled for chips that are not here: what travels meanwhile, and what is stored."""

import math
import re

import jax.numpy as jnp
import pytest

from axon.kernels.attention import Causal, SameDocument
from axon.layout import Layout, Placement
from axon.nn import Attention
from axon.plan.collectives import collectives
from axon.plan.hlo import Module, array_bytes, arrays
from axon.plan.topology import devices

DIMS = {"embed": 256, "heads": 4, "kv_heads": 2, "head_dim": 128}
MASK = Causal() & SameDocument()
BATCH, DEVICES = 2, 8
COMPILERS = {"v5e:2x4": "libtpu", "v5p:2x2x2": "libtpu", "h200:8": "jax_plugins.xla_cuda13"}


@pytest.fixture
def program(lowered):
    """program(target, seq): attention by a ring, forward and backward, lowered for it."""

    def of(target, seq):
        pytest.importorskip(COMPILERS[target], reason="needs its compiler: scripts/setup compilers")
        placement = Placement.of(Layout({"context": DEVICES}, context="ring"), devices(target))
        return lowered(placement, Attention(DIMS, MASK), BATCH, seq, compute=jnp.bfloat16)

    return of


def permutes(module):
    """(start, where it runs, the instructions between its start and its end) of every permute."""
    for one in module.scheduled:
        assert one.instruction.opcode != "collective-permute"  # which nothing runs beside
        if one.instruction.opcode == "collective-permute-start":
            lines = module.computations[one.computation]
            begins = lines.index(one.instruction)
            ends = next(n for n, line in enumerate(lines) if one.instruction.name in line.operands)
            assert lines[ends].opcode == "collective-permute-done"
            yield one, lines[begins:ends]


def kernels(lines):
    return [line.name for line in lines if "tpu_custom_call" in line.attributes]


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5e:2x4", "v5p:2x2x2"])
def test_a_ring_on_tpus_sends_while_the_kernel_works(target, program):
    """Forward and backward; of the gradients' last two steps a part travels while other work is done."""
    module = Module.of(program(target, 4096).compile().as_text())
    found = list(permutes(module))
    in_loops = [(one, between) for one, between in found if one.times > 1]
    assert {one.times for one, _ in in_loops} == {DEVICES - 2, DEVICES - 3}  # of the forward, and of the backward
    assert all(kernels(between) for _, between in in_loops)
    assert all(sum(line.cycles for line in between) for _, between in found)
    size = {one.instruction.name: array_bytes(one.instruction.arrays) * one.times for one, _ in found}
    hidden = sum(size[one.instruction.name] for one, between in found if kernels(between))
    assert hidden >= 0.8 * sum(size.values())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h200:8"])
def test_at_32k_tokens_a_ring_sends_no_more_than_its_formula(target, program):
    """docs/parallelism.md: keys and values twice, and their gradients in float32; and the keys' documents."""
    seq = 32768
    text = program(target, seq).compile().as_text()
    tokens = (DEVICES - 1) * BATCH * seq // DEVICES
    keys = 2 * tokens * DIMS["kv_heads"] * DIMS["head_dim"]
    found = collectives(text)
    assert {one.kind for one in found} == {"collective-permute", "all-reduce"}  # the latter of weights' gradients
    permuted = [one for one in found if one.kind == "collective-permute"]
    sent = sum(one.times * one.sent for one in permuted)
    assert sent <= keys * (2 + 2 + 4) + 2 * 4 * tokens
    # XLA for GPUs has one transfer at a time beside work.
    least = 0.7 if target.startswith("h200") else 1
    assert sum(one.times * one.sent for one in permuted if one.asynchronous) >= least * sent
    assert pairs_of_positions({shape for _, shape in arrays(text)}, seq) == []


@pytest.mark.full
def test_at_32k_tokens_a_cpus_program_has_no_array_of_all_pairs(lowered, placed):
    seq = 32768
    text = lowered(placed({"context": DEVICES}, context="ring"), Attention(DIMS, MASK), BATCH, seq).as_text()
    shapes = {tuple(map(int, found[:-1].split("x"))) for found in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)}
    assert pairs_of_positions(shapes, seq) == []


def pairs_of_positions(shapes, seq):
    """Those of the size of a device's positions by a device's positions, or more: two such dimensions, or as large."""
    own = seq // DEVICES
    pairs = BATCH * DIMS["heads"] * own**2
    return [s for s in shapes if math.prod(s) >= pairs or sum(size >= own for size in s) > 1]
