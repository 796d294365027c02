"""No implementation that runs fast holds an array of groups × rows."""

import math

import jax
import jax.numpy as jnp
import pytest

from axon.kernels.grouped_matmul import grouped_matmul_reference, grouped_matmul_tpu, grouped_matmul_xla
from axon.plan.flops import bodies_of

ROWS, EMBED, OUT = 4096, 128, 256

FAST = {"xla": grouped_matmul_xla, "tpu": grouped_matmul_tpu}


def operands(groups):
    shapes = (ROWS, EMBED), (groups, EMBED, OUT), (ROWS, OUT)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return x, w, dy, jax.ShapeDtypeStruct((groups,), jnp.int32)


def with_gradients(implementation):
    def run(x, w, dy, sizes):
        y, backward = jax.vjp(lambda x, w: implementation(x, w, sizes), x, w)
        return y, *backward(dy)

    return run


def values(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars if hasattr(variable.aval, "shape"))
        for body in bodies_of(equation.params):
            yield from values(body)


def largest(implementation, groups):
    jaxpr = jax.make_jaxpr(with_gradients(implementation))(*operands(groups))
    return max(math.prod(value.shape) for value in values(jaxpr.jaxpr))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("groups", [4, 64])
def test_no_value_is_larger_than_the_operands_and_a_tile_of_rows(name, groups):
    tile = 512
    assert largest(FAST[name], groups) <= max((ROWS + tile) * OUT, groups * EMBED * OUT)
    assert largest(grouped_matmul_reference, groups) >= groups * ROWS * OUT  # what is measured can be large


def test_the_compiled_program_needs_no_more_room_for_more_groups():
    def temporary(implementation, groups):
        compiled = jax.jit(with_gradients(implementation)).lower(*operands(groups)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temporary(grouped_matmul_xla, groups) for groups in (4, 64))
    assert many - few <= 64 * EMBED * OUT * 4  # a copy of the weights at most
    ragged = [temporary(jax.lax.ragged_dot, groups) for groups in (4, 64)]
    assert ragged[1] - ragged[0] > ROWS * EMBED * 4 * 32
