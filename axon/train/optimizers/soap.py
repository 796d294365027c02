"""SOAP: Adam in the eigenbases of Shampoo's preconditioner."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import optax
from jax import Array, lax

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.matrix import Matrix, as_matrix
from axon.train.optimizers.sharing import map_matrices

FIRST_ITERATIONS = 10
"""Of the power iteration by which the first gradient's bases are found."""

SHIFT = 1e-2
"""Added to the eigenvalues, as a fraction of their mean: in directions without gradients yet they would all be 0, and
their basis undetermined."""


FLOAT32 = 6
"""Products in bfloat16 by which a TPU makes one in float32 at `Precision.HIGHEST`."""


@dataclass(frozen=True)
class SOAP(Rule):
    """Adam in a rotated space (Vyas et al., arXiv:2409.11321): the eigenbases of means of g gᵀ and gᵀ g, for every
    matrix g, inputs × outputs by its axes. Vectors take Adam's step.

    The bases are updated by a power iteration and a QR decomposition every `every` steps; the first step only
    initialises them.

    State besides Adam's: two square matrices for each side of at most `largest`, split where the layout splits that
    side. FLOPs of a step for a matrix of m × n: `8 mn (m + n)`, besides those of the bases; as in Muon, they are
    divided by the devices that split a matrix, which exchange parts of the state.

    Args, besides those of `Rule`:
        b1, b2, eps: Adam's; b2 is that of the sides' means too. every: steps between two updates of the bases.
            largest: a longer side is not rotated.
    """

    b1: float = 0.95
    b2: float = 0.95
    eps: float = 1e-8
    every: int = 10
    largest: int = 8192
    _: KW_ONLY
    weight_decay: float = 0.1

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"momentum": True, "squares": False}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1)", "b1", "b2")
        check_range(self, "(0, inf)", "eps")
        check_range(self, "[1, inf)", "every", "largest")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The rotated momentum over the root of the rotated second moment, rotated back."""
        matrices = {path: m for path, spec in parameters.items() if (m := as_matrix(spec))}

        def init(params: Any) -> Any:
            moments = {path: self._moments(value, matrices.get(path)) for path, value in params.items()}
            return {"count": jnp.zeros((), jnp.int32), "moments": moments}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            count = state["count"]
            trees = {path: {"direction": g, **state["moments"][path]} for path, g in updates.items()}
            of_matrices = {path: tree for path, tree in trees.items() if path in matrices}
            after = {path: self._step(trees[path], count) for path in trees.keys() - of_matrices.keys()}
            after |= map_matrices(self._step, matrices, of_matrices, count)
            directions = {path: after[path].pop("direction") for path in updates}
            return directions, {"count": count + 1, "moments": after}

        return optax.GradientTransformation(init, update)

    def update_flops(self, parameters: Parameters) -> dict[str, float]:
        """Path → FLOPs of a step: of each side that is rotated the outer product and three rotations, `8 m²n`, and of
        its basis a product and a QR decomposition, `(2 + 8/3) m³` (Golub and Van Loan, 5.2), every `every` steps."""
        frozen = self.frozen(parameters)
        matrices = {p: m for p, spec in parameters.items() if p not in frozen and (m := as_matrix(spec))}
        return {path: FLOAT32 * self._flops(one) for path, one in matrices.items()}

    def _flops(self, matrix: Matrix) -> float:
        rows, columns = matrix.length(matrix.rows), matrix.length(matrix.columns)
        rotated = [side for side in (rows, columns) if side <= self.largest]
        return matrix.number * sum(8 * side * rows * columns + 14 / 3 * side**3 / self.every for side in rotated)

    def _moments(self, value: Array, matrix: Matrix | None) -> dict[str, Any]:
        """A parameter's initial state: of each side the mean, `side side`, and the basis, its vectors in columns."""
        zeros = {"momentum": jnp.zeros_like(value), "squares": jnp.zeros_like(value)}
        if matrix is None:
            return zeros
        sides = {"rows": matrix.rows, "columns": matrix.columns}
        bases = {
            name: _identity(matrix, side, value.dtype)
            for name, side in sides.items()
            if matrix.length(side) <= self.largest
        }
        return zeros | {name: {"mean": jnp.zeros_like(basis), "basis": basis} for name, basis in bases.items()}

    def _step(self, tree: dict[str, Any], count: Array) -> dict[str, Any]:
        """The state after a step whose gradient is `tree["direction"]`, with the step's direction in its place.

        Matrices are `n rows columns`, their sides `n rows 1 rows` and `n 1 columns columns`.
        """
        gradient, first = tree["direction"], count == 0
        sides = {name: self._side(tree[name], outer(gradient), count) for name, outer in _OUTER.items() if name in tree}
        bases = {name: side["basis"].reshape(_square(side["basis"])) for name, side in sides.items()}
        rotated = _rotated(gradient, bases)
        momentum = jnp.where(first, 0.0, self.b1 * tree["momentum"] + (1 - self.b1) * gradient)
        squares = jnp.where(first, 0.0, self.b2 * tree["squares"] + (1 - self.b2) * jnp.square(rotated))
        steps = jnp.maximum(count, 1).astype(jnp.float32)
        mean, variance = _rotated(momentum, bases) / (1 - self.b1**steps), squares / (1 - self.b2**steps)
        direction = _rotated(mean / (jnp.sqrt(variance) + self.eps), {name: b.mT for name, b in bases.items()})
        return {**sides, "momentum": momentum, "squares": squares, "direction": direction}

    def _side(self, side: Mapping[str, Array], outer: Array, count: Array) -> dict[str, Array]:
        """The mean of the outer products along a side, and their basis."""
        mean = self.b2 * side["mean"] + (1 - self.b2) * outer.reshape(side["mean"].shape)
        square = mean.reshape(outer.shape)
        size = jnp.trace(square, axis1=1, axis2=2)[:, None, None] / outer.shape[1]
        shifted = square / jnp.maximum(size, jnp.finfo(size.dtype).tiny) + SHIFT * jnp.eye(outer.shape[1])
        iterations = jnp.where(count == 0, FIRST_ITERATIONS, jnp.where(count % self.every == 0, 1, 0))
        basis = lax.fori_loop(
            0, iterations, lambda _, q: jnp.linalg.qr(_product(shifted, q))[0], side["basis"].reshape(outer.shape)
        )
        return {"mean": mean, "basis": basis.reshape(mean.shape)}


_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

_OUTER = {"rows": lambda g: _product(g, g.mT), "columns": lambda g: _product(g.mT, g)}
"""Of each side, the outer product of gradients."""


def _rotated(x: Array, bases: Mapping[str, Array]) -> Array:
    """`x` in these bases of its sides."""
    x = _product(bases["rows"].mT, x) if "rows" in bases else x
    return _product(x, bases["columns"]) if "columns" in bases else x


def _square(side: Array) -> tuple[int, int, int]:
    return (side.shape[0], side.shape[3], side.shape[3])


def _identity(matrix: Matrix, side: Sequence[int], dtype: Any) -> Array:
    """The identity on a side, for each matrix: the parameter's dimensions, 1 across from the side; then the side."""
    dimensions = range(len(matrix.shape))
    own = [matrix.shape[d] if d in side else 1 for d in dimensions]
    every = [matrix.shape[d] if d in (*matrix.count, *side) else 1 for d in dimensions]
    length = matrix.length(side)
    return jnp.broadcast_to(jnp.eye(length, dtype=dtype).reshape(*own, length), (*every, length))
