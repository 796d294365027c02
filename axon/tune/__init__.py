"""Tuning a trained model: on chats, on preferences, and on answers that the model itself samples."""

from axon.tune.actor_critic import ActorCritic
from axon.tune.chats import Chats
from axon.tune.comparisons import Comparisons
from axon.tune.environments import Calculator
from axon.tune.labelled import Labelled
from axon.tune.labelled_texts import LabelledTexts
from axon.tune.reward_model import RewardModel
from axon.tune.rewards import ExactMatch, Matches, Numeric, Overlong, Similar
from axon.tune.rollouts import Rollouts
from axon.tune.selection import AllAnswers, BestAndWorst, BestAnswers
from axon.tune.text_classifier import TextClassifier
from axon.tune.text_pairs import TextPairs
from axon.tune.words import Addition, Words

__all__ = [
    "ActorCritic",
    "Addition",
    "AllAnswers",
    "BestAndWorst",
    "BestAnswers",
    "Calculator",
    "Chats",
    "Comparisons",
    "ExactMatch",
    "Labelled",
    "LabelledTexts",
    "Matches",
    "Numeric",
    "Overlong",
    "RewardModel",
    "Rollouts",
    "Similar",
    "TextClassifier",
    "TextPairs",
    "Words",
]
