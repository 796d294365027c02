"""Orthogonalisation of matrices by matrix products alone."""

import jax.numpy as jnp
from jax import Array

from axon.axes import einsum

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""a, b, c of x ← (a + b·g + c·g²) x, g = x xᵀ, at each step: table 1 of Amsel et al., arXiv:2505.16932."""

SAFETY = 1.01
"""Bound on a singular value after rounding: the polynomials diverge not far beyond 1."""


def orthogonalize(x: Array, steps: int) -> Array:
    """Approximately u vᵀ of each x = u s vᵀ: singular values become about 1, but for those far below the norm.

    `n rows columns`, rows ≤ columns → the same. Newton–Schulz iteration with the polynomials of Polar Express (Amsel
    et al., arXiv:2505.16932). FLOPs for each matrix of m × n: `steps·(4 m²n + 2 m³)`; in float32, where n ≥ 2m,
    `4 m²n + (8·steps − 6) m³`.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    x = (x / jnp.maximum(norm * SAFETY, jnp.finfo(jnp.float32).tiny)).astype(x.dtype)
    coefficients = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:steps]]
    if x.dtype == jnp.float32 and x.shape[2] >= 2 * x.shape[1]:
        return _by_gram_matrix(x, coefficients)
    for a, b, c in coefficients:
        g = _gram(x)
        x = a * x + _product(b * g + c * _product(g, g), x)
    return x


def orthogonalize_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of `orthogonalize` for one matrix in bfloat16: `steps·(4 m²n + 2 m³)`, m the shorter side."""
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def _by_gram_matrix(x: Array, coefficients: list[tuple[float, float, float]]) -> Array:
    """The same by iterating on g alone, with one product with `x` at the end: fewer FLOPs where n ≥ 2m. Not in
    bfloat16, where g, which has squared singular values, would lose the small ones."""
    g, identity = _gram(x), jnp.eye(x.shape[1], dtype=x.dtype)

    def polynomial(coefficients: tuple[float, float, float], g: Array) -> Array:
        a, b, c = coefficients
        return a * identity + b * g + c * _product(g, g)

    p = total = polynomial(coefficients[0], g)
    for following in coefficients[1:]:
        g = _product(_product(p, g), p)
        p = polynomial(following, g)
        total = _product(p, total)
    return _product(total, x)


def _gram(x: Array) -> Array:
    return einsum("_n _row _column, _n _row_out _column -> _n _row _row_out", x, x)


def _product(x: Array, y: Array) -> Array:
    return einsum("_n _row _inner, _n _inner _column -> _n _row _column", x, y)
