"""Tuning a trained model: on chats, on preferences, and on answers that the model itself samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axon.tune.actor_critic import ActorCritic
    from axon.tune.chats import Chats
    from axon.tune.checked_rewards import MatchesSchema, MathEqual
    from axon.tune.comparisons import Comparisons
    from axon.tune.environments import Calculator
    from axon.tune.graded_comparisons import GradedComparisons
    from axon.tune.labelled import Labelled
    from axon.tune.labelled_texts import LabelledTexts
    from axon.tune.model_judge import ModelJudge
    from axon.tune.model_score import ModelScore
    from axon.tune.program_reward import Program
    from axon.tune.rewards import ExactMatch, Matches, Numeric, Overlong, Similar
    from axon.tune.rollouts import Rollouts
    from axon.tune.samplers import Samplers
    from axon.tune.selection import AllAnswers, BestAndWorst, BestAnswers
    from axon.tune.taught_chats import TaughtChats
    from axon.tune.text_pairs import TextPairs
    from axon.tune.words import Addition, Words
    from models.heads import RewardModel, TextClassifier

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
    "GradedComparisons",
    "Labelled",
    "LabelledTexts",
    "Matches",
    "MatchesSchema",
    "MathEqual",
    "ModelJudge",
    "ModelScore",
    "Numeric",
    "Overlong",
    "Program",
    "RewardModel",
    "Rollouts",
    "Samplers",
    "Similar",
    "TaughtChats",
    "TextClassifier",
    "TextPairs",
    "Words",
]

_MODULE_OF = {
    "ActorCritic": "actor_critic",
    "Addition": "words",
    "AllAnswers": "selection",
    "BestAndWorst": "selection",
    "BestAnswers": "selection",
    "Calculator": "environments",
    "Chats": "chats",
    "Comparisons": "comparisons",
    "ExactMatch": "rewards",
    "GradedComparisons": "graded_comparisons",
    "Labelled": "labelled",
    "LabelledTexts": "labelled_texts",
    "Matches": "rewards",
    "MatchesSchema": "checked_rewards",
    "MathEqual": "checked_rewards",
    "ModelJudge": "model_judge",
    "ModelScore": "model_score",
    "Numeric": "rewards",
    "Overlong": "rewards",
    "Program": "program_reward",
    "RewardModel": "models.heads",
    "Rollouts": "rollouts",
    "Samplers": "samplers",
    "Similar": "rewards",
    "TaughtChats": "taught_chats",
    "TextClassifier": "models.heads",
    "TextPairs": "text_pairs",
    "Words": "words",
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the process of an environment, which asks for one or two, then needs no JAX."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    return getattr(import_module(module if "." in module else f"{__name__}.{module}"), name)
