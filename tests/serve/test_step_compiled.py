"""The steps of an engine as the compilers of TPUs and GPUs make them: nothing is copied, and little is sent."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from axon.config import load, root_of
from axon.layout import Layout, Placement
from axon.nn import Routing
from axon.plan.serving import compile_serving
from axon.plan.topology import devices
from axon.run import Serve, serving_program
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.program import ServingProgram
from models.deepseek import DeepSeek
from models.llama import Llama
from models.mixtral import Mixtral

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
LAYERS = 3
WIDE = Llama(vocab=1024, embed=1024, layers=LAYERS, heads=8, kv_heads=8, mlp=2048)
CAPACITY = Capacity(requests=16, tokens=64, length=2048)


def compiled(target, model=WIDE, mesh=None, **serve):
    """The report of decode and prefill, and the program."""
    return compiled_as(Serve(model, Layout(mesh=mesh or {}), **{"capacity": CAPACITY, **serve}), target)


def compiled_as(serve, target):
    module, package = ("jax_plugins.xla_cuda13", "CUDA") if "h200" in target else ("libtpu", "TPU")
    pytest.importorskip(module, reason=f"needs the {package} compiler: scripts/setup compilers")
    found = devices(target)
    placement = Placement.of(serve.layout, found if serve.layout.mesh else found[:1])
    program = serving_program(serve, placement)
    return compile_serving(program, target)[0], program


def check_in_place(report, program):
    """The pages that come back are those that were given, and there is room for no copy of a layer's."""
    for step in (report.decode, report.prefill):
        assert step.memory["aliased"] >= program.cache_bytes()
        assert step.memory["temporaries"] < program.cache_bytes() / LAYERS


@pytest.mark.full
@pytest.mark.draws(1)
def test_on_a_cpu_pages_are_changed_in_place_and_the_weights_of_one_layer_at_a_time_are_copied():
    model = Llama(vocab=64, embed=128, layers=4, heads=4, kv_heads=4, mlp=512)
    runtime = Runtime(model, Layout(), devices=jax.devices()[:1])
    program = ServingProgram(runtime, Capacity(requests=4, tokens=16, length=64))
    memory = runtime.lower(program.traced(program.decode)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == program.cache_bytes()
    assert memory.temp_size_in_bytes < 2 * program.parameter_bytes() / model.layers


EXPERTS = Mixtral(
    vocab=64, embed=256, layers=LAYERS, heads=2, kv_heads=2, mlp=2048, routing=Routing(experts=16, top_k=2)
)


def one_matrix(program):
    """Bytes of a device's part of a layer's experts' matrices of one kind, in the compute dtype."""
    size = program.runtime.compute_dtype.itemsize * EXPERTS.routing.experts * EXPERTS.embed * EXPERTS.mlp
    return size // len(program.runtime.placement.devices)


@pytest.mark.full
@pytest.mark.some(mesh=({"expert": 2},))
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}, {"expert": 2}], ids=str)
def test_experts_are_read_in_the_stack_of_all_layers(mesh, weights):
    runtime = Runtime(EXPERTS, Layout(mesh=mesh), devices=jax.devices()[: 2 if mesh else 1], weights=weights)
    program = ServingProgram(runtime, Capacity(requests=4, tokens=16, length=64))
    memory = runtime.lower(program.traced(program.decode)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < one_matrix(program) / 2


@pytest.mark.full
@pytest.mark.some(weights=("int8",))
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_on_a_tpu_the_kernel_reads_experts_in_the_stack_of_all_layers(weights):
    report, program = compiled("v6e:2x2", EXPERTS, {"expert": 2, "tensor": 2}, weights=weights)
    assert report.decode.choices["grouped_matmul"].startswith("tpu")
    assert report.decode.kernels["grouped_matmul"] % EXPERTS.layers == 0
    assert report.decode.memory["temporaries"] < one_matrix(program)


@pytest.mark.full
@pytest.mark.some(target=("v5e:2x2", "v5p:2x2x1"))
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_on_a_tpu_pages_are_changed_in_place_by_the_kernels_and_no_weight_is_copied(target):
    report, program = compiled(target)
    check_in_place(report, program)
    assert report.decode.choices["paged_attention"].startswith("tpu, bfloat16 pages of 128")
    for step in (report.decode, report.prefill):
        assert step.kernels == {"paged_attention_write": LAYERS, "paged_attention": LAYERS}
        assert not step.collectives
    query = program.runtime.placement.bytes_per_device(program.runtime.parameters["layers/block/attention/query"])
    assert report.decode.memory["temporaries"] < query  # of all layers
    assert 0 < (report.reading.share or 0) <= 1


@pytest.mark.full
@pytest.mark.some(dtype=("int8",))
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_on_a_tpu_weights_in_8_bits_are_converted_as_they_are_read(dtype):
    report, program = compiled("v6e:2x2", weights=dtype)
    wide = serving_program(Serve(WIDE, weights="bfloat16", capacity=CAPACITY))
    blocks = wide.parameter_bytes() - 4 * WIDE.vocab * WIDE.embed
    assert program.parameter_bytes() < wide.parameter_bytes() - 0.49 * blocks
    check_in_place(report, program)
    matrix = 2 * WIDE.embed * WIDE.mlp  # of one layer, in bfloat16
    assert report.decode.memory["temporaries"] < matrix


def check_sums(report, program, layers):
    """Two a layer, and of the rows of the table; no page is sent, and no weight."""
    for step in (report.decode, report.prefill):
        kinds = Counter()
        for one in step.collectives:
            assert one.mesh_axes == ("tensor",)
            kinds[one.kind] += one.count
        assert kinds["all-reduce"] + kinds["reduce-scatter"] <= 2 * layers + 1
        assert sum(one.bytes for one in step.collectives) < program.cache_bytes() / layers


@pytest.mark.full
def test_tensor_parallel_devices_sum_twice_a_layer_and_send_no_page_and_no_weight():
    report, program = compiled("v5e:2x4", mesh={"tensor": 8})
    check_in_place(report, program)
    check_sums(report, program, LAYERS)


LATENTS = DeepSeek(
    vocab=1024,
    embed=1024,
    layers=LAYERS,
    first_dense=LAYERS,
    heads=8,
    mlp=2048,
    expert_mlp=128,
    routing=Routing(experts=8, top_k=2),
    shared=128,
    q_latent=256,
    kv_latent=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    multi_token=True,
)


@pytest.mark.full
def test_where_the_multi_token_block_guesses_its_pages_change_in_place_and_its_programs_are_counted():
    (report, program), (plain, _) = (compiled("v6e:2x2", LATENTS, draft=draft) for draft in ("mtp", None))
    block, _ = report.guess
    pages = sum(map(program.step.placement.bytes_per_device, program.block_cache.values()))
    assert block.memory["aliased"] >= pages > 0
    assert report.decode.memory["aliased"] >= program.cache_bytes() - pages
    for step in (report.decode, report.prefill, *report.guess):
        assert step.memory["cache"] == program.cache_bytes() > plain.decode.memory["cache"]
        assert step.memory["total"] >= program.parameter_bytes() + program.cache_bytes()
    assert report.reading.seconds > plain.reading.seconds
    assert not plain.guess


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("llama3_8b_v6e", "v6e:1x1"),
        ("llama3_8b_v6e", "v5p:1x1x1"),
        ("llama3_8b_v5e_2x4", "v5e:2x4"),
        ("llama3_70b_v6e_2x4", "v6e:2x4"),
        ("mixtral_8x7b_v6e_2x4", "v6e:2x4"),
        ("llama3_8b_h200", "h200:1"),
    ],
)
def test_two_layers_of_each_configuration_compile_with_pages_in_place(name, target, weights):
    path = CONFIGS / f"{name}.gin"
    tree = load(path, root=root_of(path)).tree
    report, program = compiled_as(replace(tree, model=replace(tree.model, layers=2), weights=weights), target)
    for step in (report.decode, report.prefill):
        assert step.memory["aliased"] >= program.cache_bytes()
    check_sums(report, program, 2)
    if "h200" not in target:  # XLA's attention gathers pages there
        assert report.decode.memory["temporaries"] < 2 * program.runtime.module.dims["embed"] ** 2


@pytest.mark.full
def test_on_a_gpu_pages_are_changed_in_place():
    report, program = compiled("h200:1")
    check_in_place(report, program)
    assert report.reading.seconds is None


def test_each_configuration_says_what_is_served_and_how_much_at_once():
    for path in CONFIGS.glob("*.gin"):
        tree = load(path, root=root_of(path)).tree
        assert isinstance(tree, Serve)
        assert tree.capacity.requests in [size.tokens for size in tree.capacity.sizes()]


def test_a_decode_step_reads_the_weights_but_the_table_and_the_cache_at_half_length_however_large_the_pool_is():
    half = CAPACITY.requests * CAPACITY.length // 2
    for pool in (half, 3 * half):
        program = serving_program(Serve(WIDE, capacity=replace(CAPACITY, cache_tokens=pool)))
        table, cache = 4 * WIDE.vocab * WIDE.embed, 4 * LAYERS * 2 * half * WIDE.kv_heads * 128
        assert program.read_bytes() == pytest.approx(program.parameter_bytes() - table + cache, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_stored_in_the_dtype_that_is_asked_for(dtype):
    program = serving_program(Serve(WIDE, weights=dtype, capacity=CAPACITY))
    assert {spec.dtype for spec in program.runtime.parameters.values()} == {jnp.dtype(dtype)}
