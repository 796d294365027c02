"""A step compiled for chips that are not here: what it reports of a small model, and what of one that is too large."""

import math

import pytest

from axon.layout import Execution, Layout
from axon.plan.report import DoesNotFit, compile_step
from axon.plan.topology import devices
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

LAYERS, BATCH, SEQ, VOCAB, EMBED, MLP = 3, 16, 256, 4096, 2048, 2048
"""Wide enough for 16 devices: of shards with fewer than 128 columns the TPU compiler reduces the whole array."""
MODEL = Llama(vocab=VOCAB, embed=EMBED, layers=LAYERS, heads=16, kv_heads=16, mlp=MLP)
COMPILERS = {"v": "libtpu", "h": "jax_plugins.xla_cuda13"}


def program(target, mesh, model=MODEL, batch=BATCH, **layout):
    pytest.importorskip(COMPILERS[target[0]], reason="needs its compiler: scripts/setup compilers")
    options = {"execution": Execution(remat="full"), "devices": devices(target)}
    return Program(model, Layout(mesh=mesh, **layout), AdamW(Constant(1e-3)), batch=batch, seq=SEQ, **options)


@pytest.fixture(scope="module")
def report():
    """report(target, mesh, zero): compiled once each."""
    made = {}

    def of(target, mesh, zero=3):
        key = (target, *mesh.items(), zero)
        if key not in made:
            made[key] = compile_step(program(target, mesh, zero=zero), target)
        return made[key][0]

    return of


def line(report, kind, *axes):
    (one,) = (one for one in report.collectives if (one.kind, one.mesh_axes) == (kind, axes))
    return one


def matrices(per_layer):
    """Elements of the matrices of all layers, each `per_layer` times, and of the head once: the table stays apart."""
    layer = 4 * EMBED * EMBED + 3 * EMBED * MLP
    return per_layer * LAYERS * layer + VOCAB * EMBED


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5e:4x4", pytest.param("v5p:2x2x4", marks=pytest.mark.slow)])
def test_zero_3_on_tpus_gathers_each_weight_twice_a_layer_and_reduces_each_gradient_once(target, report):
    made = report(target, {"data": 16})
    gathered = line(made, "all-gather", "data")
    assert gathered.bytes == pytest.approx(2 * matrices(2), rel=0.02)  # bf16, forward and backward
    assert gathered.sent == pytest.approx(gathered.bytes * 15 / 16)
    # Too little is computed here to hide a ring on v5e, where the compiler makes an all-reduce of each reduce-scatter;
    # on v5p the SparseCores scatter.
    kind, times = ("reduce-scatter", 1) if target.startswith("v5p") else ("all-reduce", 2)
    assert line(made, kind, "data").sent == pytest.approx(times * 4 * matrices(1) * 15 / 16, rel=0.02)
    assert line(made, "all-to-all", "data").sent == pytest.approx(2 * 2 * BATCH * SEQ // 16 * EMBED * 15 / 16)


@pytest.mark.full
def test_zero_3_on_gpus_gathers_again_for_what_remat_repeats_and_scatters_the_same(report):
    made = report("h200:8", {"data": 8})
    assert 2 * matrices(2) < line(made, "all-gather", "data").bytes < 2 * matrices(3)
    assert line(made, "reduce-scatter", "data").sent == pytest.approx(4 * matrices(1) * 7 / 8, rel=0.02)
    assert 0 <= made.asynchronous <= 1


@pytest.mark.slow
def test_tensor_parallelism_reduces_activations_along_its_own_mesh_axis(report):
    made = report("v5e:4x4", {"data": 4, "tensor": 4}, zero=0)
    residual = 2 * BATCH // 4 * SEQ * EMBED
    assert line(made, "all-reduce", "tensor").bytes >= 2 * LAYERS * residual  # one after each half of a block
    assert any(one.mesh_axes == ("data",) for one in made.collectives)


@pytest.mark.full
def test_memory_is_told_by_part(report):
    memory = report("v5e:4x4", {"data": 16}).memory
    count = sum(math.prod(s.shape) for s in program("v5e:4x4", {"data": 16}, zero=3).parameters.values())
    assert memory["parameters"] == 4 * count // 16
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], abs=64)
    assert memory["batch"] == 5 * 4 * BATCH * SEQ // 16
    assert memory["arguments"] >= memory["parameters"] + memory["optimizer"] + memory["batch"]
    parts = ("arguments", "outputs", "temporaries", "code")
    assert memory["total"] == sum(memory[part] for part in parts) - memory["aliased"]
    assert memory["aliased"] > 0.9 * memory["parameters"] + memory["optimizer"]
    assert memory["available"] == 16 * 2**30


@pytest.mark.full
def test_flops_are_the_formulas_and_remat_executes_more(report):
    made = report("v5e:4x4", {"data": 16})
    products = LAYERS * (4 * EMBED * EMBED + 3 * EMBED * MLP) + VOCAB * EMBED
    assert made.model_flops == (6 * products + 6 * LAYERS * 16 * 128 * SEQ) * BATCH * SEQ / 16
    assert 1.1 * made.model_flops < made.executed_flops < 1.6 * made.model_flops


@pytest.mark.full
def test_cycles_kernels_and_choices_are_told(report):
    made = report("v5e:4x4", {"data": 16})
    assert made.cycles["matmul"] > 0
    assert made.cycles["other"] > 0
    forwards = 2 * LAYERS  # forward, and again in the backward
    assert made.kernels == {"axon_attention_forward": forwards, "axon_attention_backward": LAYERS}
    assert made.choices["attention"].startswith("tpu, causal")
    assert not made.uncounted
    gpu = report("h200:8", {"data": 8})
    assert gpu.choices["attention"].startswith("mosaic, causal")
    assert set(gpu.kernels) == {"axon_attention_forward", "axon_attention_dq", "axon_attention_dkv"}


@pytest.mark.full
def test_a_program_that_does_not_fit_says_by_how_much_and_what_is_largest():
    wide = Llama(vocab=32_000, embed=8192, layers=8, heads=64, kv_heads=8, mlp=28_672)
    with pytest.raises(
        DoesNotFit, match=r"(?s)not fit v5e:2x2: .*GiB too little.*parameters \d.*  1\. .*Layout\.zero = 3 \(0 now\)"
    ) as raised:
        compile_step(program("v5e:2x2", {"data": 4}, wide, batch=4), "v5e:2x2")
    assert raised.value.needed > 16 * 2**30
