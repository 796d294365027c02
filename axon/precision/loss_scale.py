"""Dynamic loss scaling: gradients in float16 are kept within its range."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from axon.checks import check_range
from axon.composition import LOSS_SCALE, REPLICAS, SKIPS, Part


@dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied by before it is differentiated, and gradients divided by after (Micikevicius et al.,
    arXiv:1710.03740, section 3.2).

    A step whose gradients are not finite applies no update, and lowers the scale. At the `floor` such a step is the
    fault that it is without scaling: see `axon.train.faults.Faults.not_finite`.

    Args:
        initial: the scale of the first step. factor: by which it rises and falls. every: after so many steps in a row
            with finite gradients it rises. floor: the least that there is.
    """

    initial: float = 2.0**16
    factor: float = 2.0
    every: int = 2000
    floor: float = 1.0

    def __post_init__(self):
        check_range(self, "(1, inf)", "factor")
        check_range(self, "[1, inf)", "every")
        check_range(self, "(0, inf)", "floor")
        check_range(self, f"[{self.floor}, inf)", "initial")

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        excludes = {REPLICAS: "replicas that update by themselves would each have a scale"}
        traits = frozenset({SKIPS, LOSS_SCALE})
        return (Part("Precision.loss_scale", "set Precision.loss_scale to None", traits, excludes),)

    def updated(self, scale: Array, steps: Array, finite: Array) -> tuple[Array, Array]:
        """The scale of the next step, and how many steps in a row were finite since it changed."""
        rises = steps + 1 >= self.every
        after_finite = jnp.where(rises, scale * self.factor, scale), jnp.where(rises, 0, steps + 1)
        lower = jnp.maximum(scale / self.factor, self.floor)
        return jnp.where(finite, after_finite[0], lower), jnp.where(finite, after_finite[1], 0)
