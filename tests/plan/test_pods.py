"""configs/pods: each run on the chips that its name says. Compiling them whole is slow, and done on request."""

from pathlib import Path

import pytest

from axon import run
from axon.config import load
from axon.layout import Placement
from axon.plan.report import compile_step
from axon.plan.topology import devices

PODS = Path(__file__).parents[2] / "configs" / "pods"
NAMES = sorted(path.stem for path in PODS.glob("*.gin"))
ATTENTION = {"axon_attention_forward", "axon_attention_backward"}
ON_HOPPER = {"axon_attention_forward", "axon_attention_dq", "axon_attention_dkv"}
FP8_ON_HOPPER = {"axon_quantized_matmul", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"}
CUDNN = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
EXPERTS = {"grouped_matmul", "grouped_matmul_transposed", "grouped_matmul_weight_gradient"}

FREE = 0.08
"""The share of each device's memory that no configuration takes."""

MAXTEXT = {"mixtral_8x7b_v5p_4x4x4": 34.1}
"""GiB a device of the same step in MaxText with remat full, see docs/measurements.md."""


def target(name):
    """`llama3_8b_v5e_4x4`, and what stands before it → `v5e:4x4`."""
    return ":".join(name.split("_")[-2:])


def program(name, *bindings):
    module, package = ("jax_plugins.xla_cuda13", "CUDA") if "h200" in name else ("libtpu", "TPU")
    pytest.importorskip(module, reason=f"needs the {package} compiler: scripts/setup compilers")
    train = load(PODS / f"{name}.gin", bindings).tree
    return run.program(train, Placement.of(train.layout, devices(target(name))))


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_holds_the_model_on_the_chips_that_the_file_is_named_after(name):
    made = program(name)
    assert made.placement.mesh.size == len(devices(target(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_step_fits_and_attention_is_a_kernel_and_on_tpus_never_a_square(name):
    made = program(name)
    report, text = compile_step(made, target(name))
    assert report.memory["total"] <= (1 - FREE) * report.memory["available"]
    if "h200" in name:
        products = FP8_ON_HOPPER if "fp8" in name else set()
        assert set(report.kernels) == (CUDNN if made.runtime.execution.kernels else ON_HOPPER) | products
    else:
        quantize = {"quantize"} if "int8" in name or "fp8" in name else set()
        assert set(report.kernels) == ATTENTION | (EXPERTS if "experts" in made.module.dims else set()) | quantize
        square = f"{made.seq},{made.seq}]"  # of 70B that is a weight's shape, too
        assert made.seq == made.module.dims["embed"] or square not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", MAXTEXT)
def test_with_remat_full_a_step_takes_no_more_memory_than_maxtexts(name):
    report, _ = compile_step(program(name, "Execution.remat = 'full'"), target(name))
    assert report.memory["total"] <= MAXTEXT[name] * 2**30
