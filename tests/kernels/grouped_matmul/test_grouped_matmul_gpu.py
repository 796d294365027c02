"""The Hopper kernels: interpreted against the formula, their units of work, and as they compile for an H200."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon import axes
from axon.errors import UserError
from axon.kernels.grouped_matmul import grouped_matmul, grouped_matmul_gradients
from axon.kernels.grouped_matmul.gpu_support import sizes_for, unsupported
from axon.kernels.grouped_matmul.gpu_units import most_tiles, product_units
from axon.layout import Execution, Layout
from axon.nn import Routing
from axon.plan.flops import count_flops
from axon.plan.topology import devices
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.mixtral import Mixtral
from scripts.bench.gpu_cases.grouped_matmul import gpu_cases

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need jax 0.11")

CASES = gpu_cases()
KERNELS = ["axon_grouped_matmul", "axon_grouped_matmul_transposed", "axon_grouped_matmul_weight_gradient"]
BOUNDS = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 1e-6}
"""Relative in norm: a rounding of each element, and no more."""


@pytest.fixture
def interpret(run_script):
    """interpret(seed, shape, …): raises if a result is too far from the formula's, or not zero where it must be."""
    return partial(_interpret, run_script)


def _interpret(run_script, seed, shape, dtype="bfloat16", accumulate="float32", results=("y", "dx", "dw"), draws=3):
    case = {"seed": seed, "shape": shape, "dtype": dtype, "accumulate": accumulate, "results": results, "draws": draws}
    found = run_script(Path(__file__).with_name("interpreted_gpu.py"), case)
    assert found["zeros"]
    for name, error in found["errors"].items():
        assert error < BOUNDS[accumulate if name == "dw" else dtype], found


@pytest.mark.full
def test_a_product_is_that_of_the_formula(seed, interpret):
    interpret(seed, (90, 128, 128, 3), results=("y",), draws=1)


@pytest.mark.full
@pytest.mark.parametrize(
    "problem",
    [
        {"shape": (300, 128, 256, 4)},
        {"shape": (203, 256, 128, 5), "dtype": "float16", "accumulate": "float16"},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_formula_whatever_the_sizes_and_nothing_races(problem, seed, interpret):
    interpret(seed, **problem)


@st.composite
def work(draw):
    rows = draw(st.sampled_from([1, 128, 300]))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=6, max_size=6)))
    return np.diff(ends, prepend=0).astype(np.int32), rows


def units(sizes, rows, tile, columns):
    table, (count,) = jax.jit(product_units, static_argnums=(1, 2, 3))(sizes, rows, tile, columns)
    assert table.shape == (most_tiles(rows, len(sizes), tile) * columns, 5)
    assert count <= len(table)
    return np.asarray(table)[:count]


@settings(max_examples=40)
@given(work())
def test_units_write_every_row_of_every_tile_of_columns_once_for_its_group(drawn):
    (sizes, rows), tile, columns = drawn, 64, 3
    owners = np.full((rows, columns), -1)
    for group, row, start, stop, column in units(sizes, rows, tile, columns):
        assert row % 8 == 0, "else TMA would fill the rest of 8 rows with zeros"
        own = slice(max(row, start), min(row + tile, stop))
        assert own.start < own.stop
        assert np.all(owners[own, column] == -1)
        owners[own, column] = group
    expected = np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - sizes.sum()])
    np.testing.assert_array_equal(owners, np.broadcast_to(expected[:, None], owners.shape))


@pytest.mark.parametrize(("groups", "most"), [(8, 1.05), (64, 1.35)])
def test_a_product_multiplies_few_more_rows_than_groups_have(groups, most, rng):
    found = []
    for _ in range(20):
        for shares in (np.full(groups, 1 / groups), rng.dirichlet(np.full(groups, 4))):
            sizes = rng.multinomial(8192, shares).astype(np.int32)
            _, row, start, stop, _ = units(sizes, 8192, 128, 1).T
            halves = [(row + half < stop) & (row + half + 64 > start) for half in (0, 64)]
            found.append(64 * np.sum(halves) / 8192)
    assert min(found) >= 1
    assert np.mean(found) <= most


def test_what_the_kernels_lack_is_said():
    x, w, chip = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((2, 128, 256), jnp.bfloat16), "NVIDIA H100 80GB HBM3"
    assert unsupported(x, w, chip) is None
    for reason, arguments in {
        "not float32": (x.astype(jnp.float32), w, chip),
        "the dtype of its rows, not int8": (x, w.astype(jnp.int8), chip),
        "there are no rows": (x[:0], w, chip),
        "multiples of 128, not 128 and 192": (x, w[:, :, :192], chip),
        "this is NVIDIA A100": (x, w, "NVIDIA A100-SXM4-80GB"),
    }.items():
        assert reason in (unsupported(*arguments) or "")


def chosen(requested, platform="gpu", embed=128):
    """The program that a product with its gradients traces to, and what is logged of the choice."""
    x, w = jnp.zeros((8, embed), jnp.bfloat16), jnp.zeros((2, embed, 128), jnp.bfloat16)
    sizes, dy = jnp.zeros(2, jnp.int32), jnp.zeros((8, 128), jnp.bfloat16)
    placement: Any = SimpleNamespace(platform=platform, explicit=True, chip="NVIDIA H200 141GB HBM3e")

    def both(x, w):
        return grouped_matmul(x, w, sizes), grouped_matmul_gradients(x, w, sizes, dy, jnp.float32, swapped=True)

    with axes.activate(
        axes.Scope(placement, execution=axes.Execution(kernels={"grouped_matmul": requested} if requested else {}))
    ) as scope:
        return str(jax.make_jaxpr(both)(x, w)), scope.choices["grouped_matmul"]


def test_they_are_chosen_on_hopper_gpus_where_they_fit():
    program, choice = chosen(None)
    assert all(name in program for name in KERNELS)
    assert choice == "mosaic, 8 rows of 128 by 128 in 2 groups, bfloat16"
    assert "not mosaic: " in chosen(None, embed=96)[1]
    assert KERNELS[0] not in chosen("xla")[0]
    for platform, embed, reason in (("tpu", 128, "a tpu"), ("gpu", 96, "96 and 128")):
        with pytest.raises(UserError, match=f"'mosaic' is unavailable for grouped_matmul: .*{reason}"):
            chosen("mosaic", platform, embed)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_program_with_them_counts_the_products_of_its_rows(case):
    counted = count_flops(case.function, *case.operands)
    assert (counted.flops, counted.uncounted) == (case.cost.flops, ())


def test_a_tile_of_columns_divides_them():
    assert [sizes_for(columns).columns for columns in (14336, 1408)] == [256, 128]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_compiles_with_nothing_spilled_and_no_wgmma_serialised(case, check_compiled):
    check_compiled(case, *KERNELS)


@pytest.mark.full
@pytest.mark.usefixtures("gpu_compiler")
def test_a_mixtral_s_step_on_h200s_calls_them():
    program = Program(
        Mixtral(vocab=128, embed=128, layers=1, heads=2, kv_heads=1, mlp=128, routing=Routing(8, 2)),
        Layout(mesh={"data": 8}, zero=3),
        AdamW(Constant(1e-3)),
        batch=8,
        seq=128,
        execution=Execution(kernels={"grouped_matmul": "mosaic"}),
        devices=devices("h200:8"),
    )
    text = program.lower().compile().as_text()
    assert program.choices["grouped_matmul"].startswith("mosaic")
    assert 'custom_call_target="mosaic_gpu' in text
