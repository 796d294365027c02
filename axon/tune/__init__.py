"""Tuning a trained model: on chats, on preferences, and on batches that the model itself writes."""

from axon.tune.chats import Chats
from axon.tune.comparisons import Comparisons
from axon.tune.reward_model import RewardModel
from axon.tune.rollouts import Rollouts
from axon.tune.words import Words

__all__ = ["Chats", "Comparisons", "RewardModel", "Rollouts", "Words"]
