"""Rewards of pairs of which each says by how much its answer is better, or that neither is."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch
from axon.train.preference import Reward, Sides, sides_of

MARGINS = "margins"
"""Array of a batch: at one token of each answer the margin of its pair, 0 at all others."""
TIE = -1.0
"""The margin of a tie."""


@dataclass(frozen=True)
class GradedReward(Reward):
    """As `Reward`, with ties and a margin m of each pair: of Δ = r_chosen − r_rejected the probability that the chosen
    answer is the better one is σ(Δ − t), that the other is σ(−Δ − t), and that neither is the rest, (e²ᵗ − 1)·σ(Δ − t)·
    σ(−Δ − t): the model of Rao and Kupper (1967, doi:10.1080/01621459.1967.10482901), t the logarithm of its threshold.

    The loss is −log of what the pair says, with Δ − margin·m in the place of Δ, plus the centring term.

    Args:
        tie: t, above 0. margin: what m is multiplied with.

    Metrics as of `Reward`; `accuracy` of a tie is whether that is the likeliest of the three.
    """

    margin: float = 1.0
    tie: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "tie")

    def specs(self, batch: int, seq: int) -> Specs:
        """As of `Reward`, and `margins`."""
        return {**super().specs(batch, seq), MARGINS: ArraySpec(("batch", "seq"), (batch, seq), jnp.float32)}

    def values(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[tuple[Array, Sides], Auxiliary]:
        scores, auxiliary = self.scores(module, batch, key)
        return (self.compared(sides_of(scores), self.margins(batch)), sides_of(scores)), auxiliary

    def compared(self, scored: Sides, margins: Array) -> Array:
        """The loss of each pair, all `batch pairs`."""
        better = -jax.nn.log_sigmoid(scored.difference - self.margin * jnp.maximum(margins, 0) - self.tie)
        sides = (jax.nn.log_sigmoid(sign * scored.difference - self.tie) for sign in (1, -1))
        neither = -sum(sides) - jnp.log(jnp.expm1(2 * self.tie))
        centred = self.centring * jnp.square(scored.chosen + scored.rejected)
        return jnp.where(margins == TIE, neither, better) + centred

    def margins(self, batch: Batch) -> Array:
        """Of each pair, `batch pairs`; `TIE` of a tie."""
        return self.summed(batch[MARGINS], batch)[..., 0]

    def is_right(self, sides: Sides, batch: Batch) -> Array:
        """A tie is the likeliest where (e²ᵗ − 1)·σ(−|Δ| − t) ≥ 1."""
        likely = jnp.expm1(2 * self.tie) * jax.nn.sigmoid(-jnp.abs(sides.difference) - self.tie) >= 1
        return jnp.where(self.margins(batch) == TIE, likely, super().is_right(sides, batch))
