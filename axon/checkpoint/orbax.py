"""What Axon uses of Orbax: its second interface, which is experimental (orbax-checkpoint 0.12)."""

from orbax.checkpoint.experimental import v1 as ocp
from orbax.checkpoint.experimental.v1 import training

__all__ = ["ocp", "training"]
