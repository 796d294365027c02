"""PiSSA: factors that begin as the leading singular vectors of their weight (Meng et al., arXiv:2404.02948)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from axon.errors import UserError
from axon.nn.param import fan_in


@dataclass(frozen=True)
class Principal:
    """The approximation of low rank that is closest to a matrix; with `iterations` by the randomised method of Halko et
    al. (arXiv:0909.4061), as the paper's fast one."""

    iterations: int | None = None

    def __call__(self, matrix: Array, rank: int) -> tuple[Array, Array]:
        """`… inputs outputs` → A, `… inputs rank`, and B, `… rank outputs`, with the same singular values each."""
        with jax.default_matmul_precision("highest"):
            u, s, v = self._decomposed(matrix, rank)
        root = jnp.sqrt(s[..., :rank])
        return u[..., :rank] * root[..., None, :], root[..., :, None] * v[..., :rank, :]

    def _decomposed(self, matrix: Array, rank: int) -> tuple[Array, Array, Array]:
        if self.iterations is None:
            u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
            return u, s, v
        turned = jnp.swapaxes(matrix, -1, -2)
        basis = _orthonormal(matrix @ jax.random.normal(jax.random.key(0), (matrix.shape[-1], rank)))
        for _ in range(self.iterations):
            basis = _orthonormal(matrix @ _orthonormal(turned @ basis))
        u, s, v = jnp.linalg.svd(jnp.swapaxes(basis, -1, -2) @ matrix, full_matrices=False)
        return basis @ u, s, v


def _orthonormal(columns: Array) -> Array:
    return jnp.linalg.qr(columns)[0]


@dataclass(frozen=True)
class of_source(fan_in):
    """Initial values that follow from a weight, which are not drawn."""

    def __call__(self, key: Array, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        raise UserError(
            "LoRA.init = 'pissa' makes factors of the weights that a run starts from, and there are none: set "
            "Train.init_from, all of whose weights it takes that LoRA.paths adapts; or LoRA.init = 'normal'"
        )
