"""The Hopper kernels of attention: interpreted against the reference, their tables, and as they compile for an H200."""

import re
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
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention,
)
from axon.kernels.attention.cost import pairs
from axon.kernels.attention.gpu import attention_gpu
from axon.kernels.attention.gpu_support import SIZES, Sizes, unsupported
from axon.kernels.attention.gpu_tiles import Operands, meeting, table
from axon.kernels.cost import Cost
from axon.plan.flops import count_flops
from scripts.bench.case import Case
from scripts.bench.gpu_cases.attention import MASKS, gpu_cases
from scripts.bench.ptxas_report import compile_for_gpu

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need jax 0.11")

CASES = gpu_cases()

BOUNDS = {"bfloat16": 6e-3, "float16": 1e-3}
"""Relative in norm. Weights and results are rounded, to 2^-9 and 2^-12."""


@pytest.fixture
def interpret(run_script):
    """interpret(seed, …): how far each result is from the reference's, and how far it may be."""
    return partial(_interpret, run_script)


def _interpret(run_script, seed, mask="documents", widths=(64, 64), lengths=(128, 128), **more):
    case = {"dtype": "bfloat16", "heads": (2, 1), "start": 0, "sorted": True, "forward": False}
    case |= {"seed": seed, "mask": mask, "widths": widths, "lengths": lengths, **more}
    return run_script(Path(__file__).with_name("interpreted_gpu.py"), case), BOUNDS[case["dtype"]]


def check(errors, bound):
    assert errors.pop("lse") < 1e-5
    assert max(errors.values()) < bound, errors


@pytest.mark.full
def test_a_forward_is_that_of_the_reference(seed, interpret):
    check(*interpret(seed, forward=True, heads=(1, 1)))


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"mask": "unmasked", "lengths": (128, 256)}, marks=pytest.mark.slow),
        {"mask": "causal", "lengths": (256, 256), "dtype": "float16"},
        pytest.param({"mask": "documents", "lengths": (256, 256), "sorted": False}, marks=pytest.mark.slow),
        {"mask": "window", "lengths": (150, 200), "start": 50},
        pytest.param({"mask": "prefix", "lengths": (200, 200), "widths": (128, 128)}, marks=pytest.mark.slow),
        {"mask": "causal", "lengths": (130, 130), "widths": (192, 128)},
        {"mask": "documents", "lengths": (100, 250), "widths": (256, 256), "start": 150},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_reference_and_nothing_races(more, seed, interpret):
    check(*interpret(seed, **more))


@pytest.mark.parametrize(
    "mask", [Everything(), Causal(), Causal() & Window(70), Prefix(100) & SameDocument(), SameDocument()], ids=str
)
@pytest.mark.few(ordered=[False])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_table_leaves_no_seen_tile_out_and_calls_none_whole_that_is_not(mask, ordered, rng):
    queries, keys, real, start = 384, 512, int(rng.integers(385, 512)), int(rng.integers(0, 120))
    documents = [rng.integers(0, 3, (2, size)).astype(np.int32) for size in (queries, keys)]
    if ordered:
        documents = [np.sort(x, axis=1) for x in documents]
    q, k = (jax.ShapeDtypeStruct((2, size, 1, 64), jnp.bfloat16) for size in (queries, keys))

    @jax.jit
    def tables(documents):
        """Whose rows are of tiles of queries, and whose are of tiles of keys."""
        met = meeting(mask, 128, 64, real, Operands(q, k, k, documents if mask.by_document else None), start)
        return [table(one, start) for one in (met, type(met)(*(x.swapaxes(1, 2) for x in met)))]

    index = start + np.arange(queries)[:, None], np.arange(keys)[None]
    allowed = mask.allowed(*index, (documents[0][:, :, None], documents[1][:, None]))
    seen = np.broadcast_to(True if allowed is None else allowed, (2, queries, keys)) & (np.arange(keys) < real)
    tiles = seen.reshape(2, 3, 128, 8, 64)
    for made, of in zip(tables(documents), (tiles, tiles.transpose(0, 3, 2, 1, 4)), strict=True):
        loops = np.asarray(made)
        for row, tile in np.ndindex(2, of.shape[1]):
            first, stop, whole, whole_stop, _ = loops[row % len(loops), tile]
            some = np.flatnonzero(of[row, tile].any(axis=(0, 2)))
            assert set(some) <= set(range(first, stop))
            assert of[row, tile].transpose(1, 0, 2)[whole:whole_stop].all()
            if not mask.by_document:
                assert len(some) == stop - first


def test_tiles_that_nobody_sees_are_skipped_and_few_are_masked():
    q = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.bfloat16)
    mask = Causal() & Window(1024)
    loops = jax.jit(lambda: table(meeting(mask, 128, 128, 4096, Operands(q, q, q, None), 0), 0))()[0]
    assert list(np.asarray(loops)[20]) == [12, 21, 13, 20, 0]


def test_what_the_kernels_lack_is_said():
    q = v = jnp.zeros((1, 128, 2, 128), jnp.bfloat16)
    config, none, chip = AttentionConfig(Causal(), 0.1), AttentionInputs(), "NVIDIA H100 80GB HBM3"
    assert unsupported(q, q, v, config, none, chip) is None
    for reason, arguments in {
        "no sinks and no ALiBi slopes": (q, q, v, config, AttentionInputs(None, 0, q, q), chip),
        "no bias by distance": (q, q, v, config, none._replace(distance_bias=jnp.zeros((2, 255))), chip),
        "no soft cap": (q, q, v, AttentionConfig(Causal(), 0.1, 30.0), none, chip),
        "scale above 0": (q, q, v, AttentionConfig(Causal(), -0.1), none, chip),
        "not 96": (q[..., :96], q[..., :96], v[..., :96], config, none, chip),
        "not float32": (*(x.astype(jnp.float32) for x in (q, q, v)), config, none, chip),
        "this is NVIDIA A100": (q, q, v, config, none, "NVIDIA A100-SXM4-80GB"),
    }.items():
        assert reason in (unsupported(*arguments) or "")


def chosen(requested, platform="gpu", chip="NVIDIA H200 141GB HBM3e", width=64, seq=128, mask=Causal()):
    """The program that attention traces to, and what is logged of the choice."""
    x, documents = jax.ShapeDtypeStruct((1, seq, 2, width), jnp.bfloat16), jax.ShapeDtypeStruct((1, seq), jnp.int32)
    placement: Any = SimpleNamespace(platform=platform, explicit=True, chip=chip)
    scope = axes.Scope(placement, execution=axes.Execution(kernels={"attention": requested} if requested else {}))
    with axes.activate(scope):
        traced = jax.make_jaxpr(lambda q, ids: attention(q, q, q, mask, documents=(ids, ids)))(x, documents)
    return str(traced), scope.choices["attention"]


def test_they_run_where_cudnn_would_need_a_bias_or_where_they_are_requested_by_name():
    program, choice = chosen("mosaic")
    assert "axon_attention_forward" in program
    assert choice == "mosaic, causal (requested by name)"
    program, choice = chosen(None)
    assert "axon_attention_forward" not in program
    assert choice == "cudnn, causal"
    packed = Causal() & SameDocument()
    program, choice = chosen(None, mask=packed)
    assert "axon_attention_forward" in program
    assert choice == "mosaic, causal & same document"
    older = "NVIDIA A100-SXM4-80GB"
    assert re.match(r"cudnn, .*not mosaic: .*A100", chosen(None, chip=older, mask=packed)[1])
    assert re.match(
        r"xla, .*not mosaic: .*A100.*not cudnn: .* bias", chosen(None, chip=older, mask=packed, seq=32768)[1]
    )
    lacking = ("tpu", "", 64, "a tpu"), ("gpu", "NVIDIA B200", 64, "B200"), ("gpu", "NVIDIA H100", 96, "96")
    for platform, chip, width, reason in lacking:
        with pytest.raises(UserError, match=f"'mosaic' is unavailable for attention: .*{reason}"):
            chosen("mosaic", platform, chip, width)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_a_program_with_them_counts_seven_backward_products_or_eight_where_both_consumers_score(case):
    q, _, v = (x.shape for x in case.operands[:3])
    mask = next(mask for mask in MASKS if f", {mask}, " in case.name)
    seen = 2 * q[2] * pairs(mask, q[1], q[1])
    of_keys, of_values = (5, 4) if q[3] + v[3] <= 256 else (6, 4)
    count = count_flops(case.function, *case.operands)
    assert count.uncounted == ()
    assert count.flops == seen * (of_keys * q[3] + of_values * v[3])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_compiles_with_nothing_spilled_and_no_wgmma_serialised(case, check_compiled):
    check_compiled(case, *(f"axon_attention_{name}" for name in ("dkv", "dq", "forward")))


@pytest.mark.usefixtures("gpu_compiler")
def test_what_does_not_fit_in_shared_memory_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(SIZES, (256, 256), SIZES[256, 256]._replace(forward=Sizes(128, 2)))
    x = jax.ShapeDtypeStruct((1, 128, 1, 256), jnp.bfloat16)
    attend = partial(attention_gpu, config=AttentionConfig(Causal(), 0.1))
    case = Case("attention", "large", attend, (x, x, x), Cost(1, 1))
    assert "shared memory" in (compile_for_gpu(case).refused or "")
