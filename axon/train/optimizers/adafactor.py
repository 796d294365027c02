"""Adafactor: Adam's second moment as the product of one vector for each side of a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.matrix import Matrix, as_matrix, within


@dataclass(frozen=True)
class Adafactor(Rule):
    """Adam with sublinear memory (Shazeer & Stern, arXiv:1804.04235).

    For a matrix, inputs × outputs by its axes, its state is the means of the squared gradient over either side: inputs
    + outputs numbers for each layer and each expert. For a vector it is all squares.

    Args, besides those of `Rule`, whose schedule is, with `relative`, a part of each matrix's root mean square:
        b1: of a momentum of the updates; None for none, and no state. decay_power: the mean of squares decays by
            1 − t^−decay_power at step t. threshold: largest root mean square of an update before the rate.
        relative: multiply the rate by the root mean square of the parameter, `floor` at least.
        eps: added to squares.
    """

    b1: float | None = None
    decay_power: float = 0.8
    threshold: float = 1.0
    relative: bool = True
    floor: float = 1e-3
    eps: float = 1e-30

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"ema": True}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1)", "b1")
        check_range(self, "(0, 1]", "decay_power")
        check_range(self, "(0, inf)", "threshold", "floor", "eps")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """Gradients over the root of their mean squares, clipped; their momentum; relative to the values."""
        one = {path: within(spec) for path, spec in parameters.items()}

        def clip(updates: Any, params: Any) -> dict[str, Array]:
            return {path: u / jnp.maximum(1.0, _rms(u, one[path]) / self.threshold) for path, u in updates.items()}

        def relative(updates: Any, params: Any) -> dict[str, Array]:
            return {path: u * jnp.maximum(self.floor, _rms(params[path], one[path])) for path, u in updates.items()}

        parts = [self._whitened(parameters), optax.stateless(clip)]
        if self.b1 is not None:
            parts.append(optax.ema(self.b1, debias=False))
        if self.relative:
            parts.append(optax.stateless(relative))
        return optax.chain(*parts)

    def _whitened(self, parameters: Parameters) -> optax.GradientTransformation:
        """Gradients over the root of the factored mean of their squares."""
        matrices = {path: as_matrix(spec) for path, spec in parameters.items()}

        def sides(path: str, squares: Array) -> tuple[Array, ...]:
            """The state for these squares: means over the outputs and over the inputs, or all squares."""
            matrix = matrices[path]
            if matrix is None:
                return (squares,)
            return tuple(jnp.mean(squares, side, keepdims=True) for side in (matrix.outputs, matrix.inputs))

        def init(params: Any) -> Any:
            moments = {path: sides(path, jnp.zeros_like(value)) for path, value in params.items()}
            return {"count": jnp.zeros((), jnp.int32), "moments": moments}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            count = state["count"] + 1
            past = 1.0 - count.astype(jnp.float32) ** -self.decay_power

            def follow(path: str) -> tuple[Array, ...]:
                new = sides(path, jnp.square(updates[path]) + self.eps)
                return tuple(past * old + (1.0 - past) * n for old, n in zip(state["moments"][path], new, strict=True))

            moments = {path: follow(path) for path in updates}
            whitened = {path: _over_root(g, moments[path], matrices[path]) for path, g in updates.items()}
            return whitened, {"count": count, "moments": moments}

        return optax.GradientTransformation(init, update)


def _over_root(gradient: Array, moments: tuple[Array, ...], matrix: Matrix | None) -> Array:
    """`gradient` over the root of the second moment, which is rows · columns / their common mean."""
    if matrix is None:
        return gradient * jax.lax.rsqrt(moments[0])
    rows, columns = moments
    rows = rows / jnp.mean(rows, matrix.inputs, keepdims=True)
    return gradient * jax.lax.rsqrt(rows) * jax.lax.rsqrt(columns)


def _rms(x: Array, dimensions: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), dimensions, keepdims=True))
