"""Tuning a trained model: batches that the model itself writes."""

from axon.tune.rollouts import Rollouts

__all__ = ["Rollouts"]
