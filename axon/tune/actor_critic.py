"""A language model with a critic: what is answered, and how good that is expected to be."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax import Array

from axon.nn import Auxiliary, Dims, Inputs, Param, constant
from axon.nn.flops import paths_in
from axon.train.preference import token_scores
from models.heads import RewardModel, WithHead


class ValueHead(nnx.Module):
    """A value at each position, made of the policy's last hidden state by `score`, `embed`; 0 at first."""

    def __init__(self, dims: Dims):
        self.score = Param("embed", dims, constant(0.0))

    def __call__(self, x: Array, inputs: Inputs) -> tuple[Array, Auxiliary]:
        return token_scores(x, self.score), Auxiliary()


class ValueModel(nnx.Module):
    """A value at each position, by a model of its own, as `RewardModel` builds."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, x: Array, inputs: Inputs) -> tuple[Array, Auxiliary]:
        own, _, auxiliary = self.model.hidden(inputs)
        return token_scores(own, self.model.score), auxiliary.within("critic/model")

    def flops_per_token(self, seq: int, frozen: Collection[str] = ()) -> int:
        """See `axon.nn.LanguageModel.flops_per_token`."""
        return self.model.flops_per_token(seq, paths_in("model", frozen))


@dataclass(frozen=True)
class ActorCritic(WithHead):
    """`model`, a language model, with a critic for the objective `PPO`.

    A run that starts from a language model takes all but that: `InitFrom.paths = ('*', '!critic/*')`.

    Args:
        critic: a language model whose last hidden state is scored, trained beside the policy; None: the policy's own.
    """

    critic: Any = None

    def build(self) -> Any:
        module = self.model.build()
        module.on_top = ("critic",)
        module.critic = ValueHead(module.dims) if self.critic is None else ValueModel(RewardModel(self.critic).build())
        return module
