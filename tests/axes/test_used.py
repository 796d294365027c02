"""The axes that a function's patterns name, found by tracing it."""

import jax
import jax.numpy as jnp

from axon.axes import axes_used, current, einsum, shard


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_every_axis_whose_row_matters_is_found_with_its_role_in_loops_too():
    def fn(x, w):
        def body(x, _):
            x = einsum("batch seq mlp, mlp embed -> batch seq.residual embed", x, w)
            return shard(einsum("batch seq embed, mlp embed -> batch seq mlp", x, w), "batch seq mlp.inner"), None

        return jax.lax.scan(body, x, length=3)[0]

    found = axes_used(fn, abstract(2, 3, 4), abstract(4, 5))
    assert found == {"batch", "seq", "seq.residual", "mlp", "mlp.inner", "embed"}
    assert current() is None


def test_one_function_is_listened_to_anew_each_time():
    def fn(x):
        return shard(x, pattern)

    for pattern in ("batch seq", "batch seq.residual"):
        assert axes_used(fn, abstract(2, 3)) == set(pattern.split())
