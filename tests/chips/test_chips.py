"""Chips as values: each of them whole, what is not known said, and options that their compilers know."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon.chips import CHIPS, GPUS, TPUS, V5E, chip_of, known, part, xla_options
from axon.config import load
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.observe.mfu import peak
from axon.plan.report import compile_step
from axon.plan.topology import device_memory, devices
from axon.train.optimizers import SGD, Constant
from axon.train.step import Program


def device(kind, platform="tpu", **more):
    return SimpleNamespace(device_kind=kind, platform=platform, **more)


def test_each_chip_has_its_own_values_and_each_name_is_of_one():
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)
    assert len(CHIPS) == len(TPUS) + len(GPUS)
    for chip in CHIPS.values():
        assert 16e9 < chip.memory < 1e12
        assert 100 < chip.ridge < 700, chip.name
        assert chip.products <= {"int8", "fp8", "fp8 in blocks of 128", "fp8 in attention"}, chip.name
    memories = {kind: device_memory(device(kind, "gpu")) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA L4")}
    assert memories == {"NVIDIA H100 80GB HBM3": 84942979072, "NVIDIA L4": 24_000_000_000}


def test_a_device_that_is_one_core_has_half_of_its_chip():
    assert part(device("TPU v4", num_cores=1)) == 0.5
    assert device_memory(device("TPU v4", num_cores=1)) == 16 * 2**30
    assert part(device("TPU v5", num_cores=2)) == part(device("TPU7x", num_cores=1)) == 1
    assert part(device("NVIDIA H200", "gpu", num_cores=132)) == 1


def test_an_unknown_chip_is_told_and_never_taken_for_another():
    assert chip_of("TPU v99") is None
    for needed in (known, lambda kind: device_memory(device(kind)), lambda kind: device_memory(device(kind, "gpu"))):
        with pytest.raises(UserError, match=r"nothing is known of the chip 'TPU v99'.*axon/chips"):
            needed("TPU v99")
    assert xla_options([device("TPU v99")]) == ((), "none: nothing is known of the chip 'TPU v99'")


def test_options_are_by_chip_whichever_of_its_names_and_none_are_explained():
    assert xla_options(jax.devices("cpu")) == xla_options([]) == ((), "")
    assert xla_options([device("TPU v5e")]) == xla_options([device("TPU v5 lite")]) == (V5E.options, "")
    for kind in ("TPU v4", "TPU7x", "NVIDIA H200"):
        options, why = xla_options([device(kind)])
        assert bool(options) == (not why)
        assert options or kind in why


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_a_chip_gets_its_options_and_its_compiler_takes_them(chip):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    placement = Placement.of(Layout({"data": -1}), devices(chip.topology))
    assert placement.chip in chip.kinds
    options, _ = xla_options(placement.devices)
    assert options == chip.options
    stored = NamedSharding(placement.mesh, PartitionSpec("data"))
    array = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=stored)
    jax.jit(jnp.sin).lower(array).compile(compiler_options={one.name: one.value for one in options})


@pytest.mark.parametrize("chip", [chip for chip in GPUS if chip.target], ids=lambda chip: chip.name)
def test_a_described_gpu_is_called_as_a_real_one_and_programs_compile_for_it(chip):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    placement = Placement.of(Layout({"data": -1}), devices(f"{chip.name}:2"))
    assert placement.chip in chip.kinds
    stored = NamedSharding(placement.mesh, PartitionSpec("data"))
    array = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=stored)
    assert jax.jit(jnp.sin).lower(array).compile() is not None


OWN = """
from dataclasses import replace

from axon.chips import CHIPS as KNOWN, Option

H100, = KNOWN["h100"].kinds
CHIPS = (
    replace(
        KNOWN["h100"], name="mine", kinds=("NVIDIA Mine",), peak=1e15, topology="mine:1",
        target=KNOWN["h100"].target.replace(H100, "NVIDIA Mine"),
        options=(Option("xla_gpu_enable_latency_hiding_scheduler", True, "to try", "not measured"),),
    ),
)
"""


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_chip_of_ones_own_is_one_entry_for_which_programs_compile(tmp_path, monkeypatch, request):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    with pytest.raises(UserError, match="no chip is called 'mine'"):
        devices("mine:2")
    (tmp_path / "my_chip.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop("my_chip", None))
    (tmp_path / "run.gin").write_text(
        "import my_chip\nfrom models.llama import Llama\nServe.model = @Llama()\nLlama.vocab = 64\nLlama.embed = 64\n"
        "Llama.layers = 1\nLlama.heads = 2\nLlama.kv_heads = 2\nLlama.mlp = 64\n"
    )
    tree, own = load(tmp_path / "run.gin", root="Serve").tree, devices("mine:2")
    made = Program(tree.model, Layout({"data": 2}), SGD(Constant(0.1)), batch=2, seq=8, devices=own)
    report, _ = compile_step(made, "mine:2")
    assert report.options == {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert report.memory["available"] == device_memory(own[0]) == CHIPS["h100"].memory
    assert peak(own).flops == 2e15
