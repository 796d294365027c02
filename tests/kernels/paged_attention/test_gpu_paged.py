"""The Hopper kernel of paged attention: interpreted against the reference, its work, and as it compiles for an H200."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.kernels.paged_attention import Cache, paged_attention
from axon.kernels.paged_attention.blocks import blocks
from axon.kernels.paged_attention.gpu_support import SIZES, unsupported
from axon.kernels.paged_attention.gpu_work import Shape, queries_of_block, row_positions, shape_of, table
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.plan.topology import devices
from scripts.bench.gpu_cases.paged_attention import gpu_cases

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")

CASES = gpu_cases()

BOUNDS = {"bfloat16": 6e-3, "float16": 1e-3}
"""Relative in norm. Weights and results are rounded, to 2^-9 and 2^-12."""


def check(run_script, seed, **more):
    case = {"lengths": [[1, 40], [1, 21]], "heads": (2, 1, 64), "page_size": 16, "q": "bfloat16"}
    case |= {"padding": 0, "splits": False, "seed": seed, **more}
    error = run_script(Path(__file__).with_name("interpreted_gpu.py"), case)
    assert error < BOUNDS[case["q"]]


SLOW = pytest.mark.slow
MODES = [
    pytest.param({"lengths": [[1, 700], [1, 9]], "splits": True, "page_size": 128}, id="decode, split"),
    pytest.param(
        {"lengths": [[100, 150], [70, 70], [0, 12]], "heads": (4, 2, 64), "page_size": 32}, id="prefill and chunk"
    ),
    pytest.param(
        {
            "lengths": [[70, 500]],
            "heads": (4, 1, 64),
            "splits": True,
            "window": 400,
            "extra": ["sinks"],
            "page_size": 64,
        },
        id="chunk, split",
        marks=SLOW,
    ),
    pytest.param(
        {
            "lengths": [[3, 150], [4, 70], [1, 1]],
            "heads": (3, 1, 64),
            "padding": 3,
            "window": 40,
            "soft_cap": 3.0,
            "extra": ["sinks", "alibi_slopes"],
        },
        id="verification, all of a score",
    ),
    pytest.param(
        {"lengths": [[1, 300]], "heads": (2, 1, 128), "dtype": "float16", "q": "float16", "page_size": 128},
        id="float16, head_dim 128",
        marks=SLOW,
    ),
    pytest.param(
        {"lengths": [[1, 300], [1, 9]], "heads": (2, 1, 128), "dtype": "int8", "page_size": 64}, id="int8 decode"
    ),
    pytest.param(
        {"lengths": [[70, 200]], "dtype": "int8", "page_size": 128, "window": 90}, id="int8 chunk", marks=SLOW
    ),
    pytest.param(
        {"lengths": [[70, 200]], "heads": (2, 1, 128), "dtype": "float8_e4m3fn", "page_size": 32}, id="fp8 chunk"
    ),
    pytest.param(
        {"lengths": [[1, 400]], "dtype": "float8_e4m3fn", "page_size": 32, "splits": True},
        id="fp8 decode, split",
        marks=SLOW,
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("more", MODES)
def test_every_mode_is_that_of_the_reference_and_nothing_races(more, run_script, seed):
    check(run_script, seed, **more)


def ragged(lengths, columns=8):
    """(queries, kv_len) of each sequence."""
    lens, bounds = [kv for _, kv in lengths], np.cumsum([0, *(n for n, _ in lengths)])
    pages = jnp.zeros((len(lengths), columns), jnp.int32)
    return AttentionInputs(jnp.asarray(lens, jnp.int32), pages, jnp.asarray(bounds, jnp.int32))


@pytest.mark.few(window=(50,))
@pytest.mark.parametrize("window", [None, 1, 50, 700])
def test_a_table_leaves_no_seen_tile_out_and_calls_none_whole_that_is_not(window, rng):
    lengths = [(int(n), int(n + rng.integers(0, 600))) for n in (1, 90, 0, 5, 200)]
    config = AttentionConfig(0.1, window)
    shape = Shape(page_size=64, columns=16, tile=64, stages=4, rows=128, group=4, splits=1, config=config)

    @jax.jit
    def positions_and_loops(inputs):
        plan = blocks(inputs, 300, 32)
        return row_positions(plan, shape), table(plan, shape)

    made: Any = positions_and_loops(ragged(lengths))
    positions, loops = map(np.asarray, made)
    keys: Any = np.arange(1024)
    seen = np.asarray(config.seen(positions[:, :, None], keys)) & (positions >= 0)[:, :, None]
    tiles = seen.reshape(*positions.shape, -1, shape.tile)
    real = positions >= 0
    for block, (sequence, first, stop, whole, whole_stop, end) in enumerate(loops):
        some = np.flatnonzero(tiles[block].any(axis=(0, 2)))
        assert list(some) == list(range(first, stop))
        assert tiles[block, real[block]][:, max(first, whole) : max(first, min(stop, whole_stop))].all()
        assert end == (positions[block].max() + 1 if len(some) else 0)
        assert not len(some) or lengths[sequence][1] >= end
    assert real.sum() == shape.group * sum(n for n, _ in lengths)


@pytest.mark.parametrize(
    ("tokens", "sequences", "queries", "rows", "splits"),
    [
        (64, 64, 1, 64, 1),  # a decode step
        (2, 2, 1, 64, 17),  # of few sequences
        (128, 32, 16, 64, 1),  # verification
        (4096, 4, 32, 128, 1),  # a prefill
        (256, 1, 32, 128, 4),  # a chunk of one
    ],
)
def test_blocks_and_parts_fill_the_multiprocessors(tokens, sequences, queries, rows, splits):
    q: Any = jax.ShapeDtypeStruct((tokens, 32, 128), jnp.bfloat16)
    columns = 512
    cache = jax.eval_shape(partial(Cache.empty, 2, 8, 64, 128, "bfloat16"))
    inputs = ragged([(tokens // sequences, 32768)] * sequences, columns)
    assert queries_of_block(q, cache, inputs) == queries
    plan: Any = jax.eval_shape(lambda inputs: blocks(inputs, tokens, queries), inputs)
    sized: Any = SimpleNamespace(sizes=np.zeros(plan.sizes.shape), queries=queries)
    shape = shape_of(q, cache, inputs, sized, AttentionConfig(1))
    assert (shape.rows, shape.splits) == (rows, splits)


def operands(*, heads=4, head_dim=128, page_size=16, dtype="bfloat16", q="bfloat16", **given) -> Any:
    rows = [jax.ShapeDtypeStruct((3, count, head_dim), jnp.dtype(q)) for count in (heads, 2, 2)]
    cache = jax.eval_shape(partial(Cache.empty, 9, 2, page_size, head_dim, dtype))
    return *rows, cache, replace(ragged([(1, 1)] * 3), **given)


def test_what_the_kernel_lacks_is_said():
    for reason, (changed, chip) in {
        "head_dim 64 or 128, not 96": ({"head_dim": 96}, "NVIDIA H200"),
        "pages of 16, 32, 64 or 128, not 48": ({"page_size": 48}, "NVIDIA H200"),
        "not float32": ({"q": "float32"}, "NVIDIA H200"),
        "a cache of the queries' bfloat16, not float16": ({"dtype": "float16"}, "NVIDIA H200"),
        "over a quantised cache it supports queries of bfloat16": ({"dtype": "int8", "q": "float16"}, "NVIDIA H200"),
        "quantised pages of 32 or more, not 16": ({"dtype": "float8_e4m3fn"}, "NVIDIA H200"),
        "64 heads that share one of keys, not 65": ({"heads": 130}, "NVIDIA H200"),
        "no bias by distance": ({"distance_bias": jnp.zeros((4, 255))}, "NVIDIA H200"),
        "this is NVIDIA A100": ({}, "NVIDIA A100-SXM4-80GB"),
    }.items():
        q, _, _, cache, inputs = operands(**changed)
        assert reason in (unsupported(q, cache, inputs, chip) or "")
    q, _, _, cache, inputs = operands(sinks=jnp.zeros(4), alibi_slopes=jnp.zeros(4))
    assert unsupported(q, cache, inputs, "NVIDIA H100 80GB HBM3") is None


def chosen(requested, chip="NVIDIA H200", **changed):
    """The program that a call traces to, and what is logged of the choice."""
    placement: Any = SimpleNamespace(platform="gpu", explicit=True, chip=chip)
    q, k, v, cache, inputs = operands(**changed)
    ragged = inputs.kv_lens, inputs.page_table, inputs.cu_q_lens
    with axes.activate(
        axes.Scope(placement, execution=axes.Execution(kernels={"paged_attention": requested} if requested else {}))
    ) as scope:
        program = jax.make_jaxpr(lambda q, k, v, cache: paged_attention(q, k, v, cache, *ragged))(q, k, v, cache)
    return str(program), scope.choices["paged_attention"]


def test_it_is_chosen_on_hopper_gpus_where_it_fits():
    program, choice = chosen(None)
    assert "axon_paged_attention" in program
    assert choice == "mosaic, bfloat16 pages of 16"
    assert "axon_paged_attention" not in chosen(None, "NVIDIA B200")[0]
    assert "axon_paged_attention" not in chosen("xla")[0]
    for reason, more in {"B200": {"chip": "NVIDIA B200"}, "not 96": {"head_dim": 96}}.items():
        with pytest.raises(UserError, match=f"'mosaic' is unavailable for paged_attention: .*{reason}"):
            chosen("mosaic", **more)


def test_a_slot_of_shared_memory_is_always_the_same_consumers():
    assert all(sizes.alternating.stages % 2 == 0 for sizes in SIZES.values())


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_compiles_with_nothing_spilled_and_no_wgmma_serialised(case, check_compiled):
    check_compiled(case, "axon_paged_attention")


@pytest.mark.full
@pytest.mark.usefixtures("gpu_compiler")
def test_new_tokens_are_written_in_place_and_no_copy_of_the_cache_is_made():
    mesh = jax.sharding.Mesh(np.array(devices("h200:1")), ("one",))
    place = jax.sharding.NamedSharding(mesh, jax.P())
    names = "hopper, decode, bfloat16, head_dim 128", "hopper, decode, int8, head_dim 64"
    for case in (one for one in CASES if one.name.startswith(names)):
        operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in case.operands]
        shard = jax.shard_map(case.function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        cached = [index for index, a in enumerate(operands) if a.shape[:1] == operands[3].shape[:1]]
        memory: Any = jax.jit(shard, donate_argnums=cached).lower(*operands).compile().memory_analysis()
        size = sum(operands[index].size * operands[index].dtype.itemsize for index in cached)
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 50
