"""Products of operands in 8 bits as those of matrices, beside the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.quantized_matmul import Quantized
from axon.precision import matrices

SIZES = {"batch": 3, "seq": 8, "heads": 2, "head_dim": 4, "mlp": 16}
X = ("batch", "seq", "heads", "head_dim")
CASES = {
    "one for all": ({}, {}),
    "a token and an output": ({"batch": 3, "seq": 8}, {"mlp": 16}),
    "a sequence": ({"batch": 3}, {}),
    "every other axis": ({"batch": 3, "heads": 2}, {"heads": 2, "mlp": 4}),
    "blocks": ({"batch": 3, "seq": 8, "heads": 2, "head_dim": 2}, {"heads": 2, "head_dim": 2, "mlp": 2}),
    "blocks of positions alone": ({"seq": 4}, {}),
    "the finer on the right": ({}, {"heads": 2, "mlp": 16}),
}


def operand(rng, names, counts):
    shape = [SIZES[name] for name in names]
    scales = rng.uniform(0.5, 2, [counts.get(name, 1) for name in names])
    return Quantized(jnp.asarray(rng.integers(-127, 128, shape), jnp.int8), jnp.asarray(scales, jnp.float32))


def wide(operand):
    scales = np.asarray(operand.scales, np.float64)
    for axis, size in enumerate(operand.values.shape):
        scales = np.repeat(scales, size // scales.shape[axis], axis=axis)
    return np.asarray(operand.values, np.float64) * scales


@pytest.mark.parametrize("out", [("batch", "seq", "mlp"), ("mlp", "batch", "seq")])
@pytest.mark.parametrize("case", CASES)
def test_the_sum_over_axes_that_both_have_is_that_of_the_formula(case, out, rng):
    names = X, ("heads", "head_dim", "mlp")
    a, b = (operand(rng, *one) for one in zip(names, CASES[case], strict=True))
    assert matrices.fits(a, names[0], b, names[1], out)
    found = jax.jit(lambda a, b: matrices.product(a, names[0], b, names[1], out, jnp.float32))(a, b)
    expected = np.einsum("bshd,hdm->bsm", wide(a), wide(b)).transpose(["bsm".index(name[0]) for name in out])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_where_both_have_scales_by_row_and_block_they_are_multiplied_in_bfloat16(rng):
    names = ("batch", "seq"), ("seq", "mlp")
    a, b = operand(rng, names[0], {"batch": 3, "seq": 4}), operand(rng, names[1], {"seq": 4, "mlp": 16})
    run = jax.jit(lambda a, b: matrices.product(a, names[0], b, names[1], ("batch", "mlp"), jnp.float32))
    expected = wide(a) @ wide(b)
    assert np.abs(run(a, b) - expected).max() < 2**-8 * (np.abs(wide(a)) @ np.abs(wide(b))).max()
    assert "bf16" in str(jax.make_jaxpr(run)(a, b))


def test_two_dtypes_or_an_axis_of_both_that_stays_are_none_of_matrices(rng):
    a, b = operand(rng, ("batch", "seq"), {}), operand(rng, ("seq", "mlp"), {})
    assert matrices.fits(a, ("batch", "seq"), b, ("seq", "mlp"), ("batch", "mlp"))
    other = b._replace(values=b.values.astype(jnp.float8_e4m3fn))
    assert not matrices.fits(a, ("batch", "seq"), other, ("seq", "mlp"), ("batch", "mlp"))
    assert not matrices.fits(a, ("batch", "seq"), b, ("seq", "mlp"), ("batch", "seq", "mlp"))
