"""Counting FLOPs on the jaxpr."""

import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from axon.config import load, root_of
from axon.layout import Placement
from axon.plan.flops import Count, count_flops, count_jaxpr, flops_by_module
from axon.plan.memory import arguments
from axon.plan.topology import devices
from axon.run import program

LORA = Path(__file__).parents[2] / "configs/tune/llama3_8b_lora_h100_1.gin"


def sizes(n: int) -> list[int]:
    return [random.randint(1, 9) * 2 for _ in range(n)]


def of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_product_of_matrices_counts_two_per_multiply_and_add():
    b, m, k, n = sizes(4)
    assert count_flops(lambda x, y: x @ y, of(m, k), of(k, n)) == Count(2 * m * k * n)
    einsum = lambda x, y: jnp.einsum("bmk,bkn->nbm", x, y)  # noqa: E731
    assert count_flops(einsum, of(b, m, k), of(b, k, n)) == Count(2 * b * m * k * n)


def test_the_backward_of_a_product_counts_twice_its_forward():
    m, k, n = sizes(3)
    loss = lambda x, w: jnp.sum((x @ w) ** 2)  # noqa: E731
    assert count_flops(jax.value_and_grad(loss, (0, 1)), of(m, k), of(k, n)).flops == 3 * 2 * m * k * n


def test_a_scan_counts_its_body_times_its_length():
    m, length = sizes(2)
    scanned = lambda x, w: lax.scan(lambda c, w: (c @ w, None), x, w)[0]  # noqa: E731
    assert count_flops(jax.jit(scanned), of(m, m), of(length, m, m)).flops == length * 2 * m**3


def test_modules_have_what_is_counted_in_their_scopes_in_loops_and_remat_too():
    m, length = sizes(2)

    def layer(x, w):
        with jax.named_scope("inner"):
            x = lax.cond(x[0, 0] > 0, lambda x: x, lambda x: jnp.tanh(x @ w), x)
        return x, None

    @jax.named_scope("outer")
    def loss(ws, x):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, ws)[0] @ x)

    traced = jax.make_jaxpr(jax.grad(loss))(of(length, m, m), of(m, m)).jaxpr
    found = flops_by_module(traced)
    assert found.keys() == {"outer", "outer/inner"}
    assert sum(found.values()) == count_flops(jax.grad(loss), of(length, m, m), of(m, m)).flops
    assert found["outer/inner"] >= 4 * length * 2 * m**3 - 2 * m**3


def test_remat_counts_what_is_computed_again():
    m, length = sizes(2)

    def loss(x, w):
        block = jax.checkpoint(lambda c, w: (jnp.sin(c @ w) @ w, None))
        return jnp.sum(lax.scan(block, x, w)[0])

    grad = count_flops(jax.grad(loss, 1), of(m, m), of(length, m, m)).flops
    # Forward 2 products, 1 of them again for the backward (the last is not needed), backward 4.
    assert length * 2 * m**3 * 7 <= grad <= length * 2 * m**3 * 8


def test_the_dearest_branch_of_a_cond_counts():
    (m,) = sizes(1)
    branches = lambda p, x: lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x)  # noqa: E731
    assert count_flops(branches, jax.ShapeDtypeStruct((), jnp.bool_), of(m, m)).flops == 2 * 2 * m**3


def test_a_while_loop_counts_nothing_and_says_so():
    (m,) = sizes(1)
    loop = lambda x: lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ x, x) @ x  # noqa: E731
    count = count_flops(loop, of(m, m))
    assert count.flops == 2 * m**3
    assert count.uncounted == (f"a while loop runs an unknown number of times ({2 * m**3:,} FLOPs each time)",)
    assert count_flops(lambda x: lax.while_loop(lambda x: x.sum() < 0, lambda x: x + 1, x), of(m)) == Count()


def test_a_loop_of_known_length_is_a_scan():
    (m,) = sizes(1)
    assert count_flops(lambda x: lax.fori_loop(0, 5, lambda i, x: x @ x, x), of(m, m)) == Count(5 * 2 * m**3)


def test_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def double(x):
        return x @ x

    double.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    (m,) = sizes(1)
    assert count_flops(double, of(m, m)).flops == 2 * m**3
    assert count_flops(jax.grad(lambda x: double(x).sum()), of(m, m)).flops == 3 * 2 * m**3
    assert count_flops(lambda x: jax.nn.relu(x @ x), of(m, m)).flops == 2 * m**3


@pytest.mark.parametrize("manual", [{"data"}, {"data", "tensor"}])
def test_a_shard_map_counts_once_per_device_of_its_manual_axes(manual):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    k, n = sizes(2)

    def product(x, w):
        rows = PartitionSpec(tuple(sorted(manual)))
        return jax.shard_map(
            lambda x, w: x @ w,
            mesh=mesh,
            in_specs=(rows, PartitionSpec()),
            out_specs=rows,
            axis_names=manual,
            check_vma=False,
        )(x, w)

    assert count_flops(jax.jit(product), of(16, k), of(k, n)).flops == 2 * 16 * k * n


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_its_kernel_for_each_output(groups):
    batch, height, features = sizes(3)

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )

    count = count_flops(conv, of(batch, height, 4), of(3, 4 // groups, features))
    assert count.flops == 2 * batch * height * features * 3 * 4 // groups


def test_a_ragged_product_counts_each_row_once():
    m, k, n, groups = sizes(4)
    count = count_flops(lax.ragged_dot, of(m, k), of(groups, k, n), jax.ShapeDtypeStruct((groups,), jnp.int32))
    assert count.flops == 2 * m * k * n


def test_a_kernel_counts_by_its_estimate_or_by_its_whole_grid_and_is_named():
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def call(x, estimate):
        return pl.pallas_call(kernel, out_shape=of(8, 8), cost_estimate=estimate, interpret=True, name="squared")(x)

    estimate = pl.CostEstimate(flops=1234, transcendentals=0, bytes_accessed=0)
    assert count_flops(lambda x: call(x, estimate), of(8, 8)) == Count(1234)
    count = count_flops(lambda x: call(x, None), of(8, 8))
    doubt = "the Pallas kernel squared has no cost estimate: all blocks of its grid count, also those that it skips"
    assert count == Count(2 * 8**3, (doubt,))


@pytest.mark.full
@pytest.mark.draws(1)
def test_lora_of_8b_executes_at_most_72_hundredths_of_full_fine_tuning_with_2_of_its_state():
    bindings = ["CHATS = 'chats.jsonl'", "TOKENIZER = 'tokenizer.json'"]
    tree, found = load(LORA, bindings, root=root_of(LORA, bindings)).tree, []
    for transforms in (tree.transforms, ()):
        made = program(replace(tree, transforms=transforms), Placement.of(tree.layout, devices("h100:1")))
        found.append((count_jaxpr(made.trace().jaxpr.jaxpr).flops, arguments(made)["optimizer"]))
    (flops, state), (of_all, state_of_all) = found
    assert flops <= 0.72 * of_all
    assert state <= 0.02 * state_of_all
