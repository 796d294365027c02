"""Tuning a trained model: on chats, and on batches that the model itself writes."""

from axon.tune.chats import Chats
from axon.tune.rollouts import Rollouts
from axon.tune.words import Words

__all__ = ["Chats", "Rollouts", "Words"]
