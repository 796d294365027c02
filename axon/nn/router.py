"""Which experts a token goes to, with which weights, and what keeps their load even."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from axon import axes
from axon.axes import add, einsum, over_positions, shard
from axon.checks import check_range
from axon.errors import UserError, suggest
from axon.nn.auxiliary import Auxiliary
from axon.nn.param import Dims, Param, Variable, constant

SCORES = ("softmax", "sigmoid")
STREAM = "batch seq.residual"


@dataclass(frozen=True)
class Routing:
    """How a router chooses `top_k` of `experts` for each token (Shazeer et al., arXiv:1701.06538).

    Args:
        scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3, arXiv:2412.19437).
        normalise: whether the weights of the chosen experts are divided by their sum. scale: multiplies them.
        groups, kept_groups, group_best: experts are in `groups` equal parts, and a token's are of the `kept_groups`
            whose `group_best` best scores have the largest sum: node-limited routing, with the two best in DeepSeek-V3,
            and the best alone in DeepSeek-V2 (arXiv:2405.04434).
        bias_rate: how far each step moves a bias up for each expert with less than the mean load, and down for one
            with more. The bias only takes part in the choice (Wang et al., arXiv:2408.15664); 0 for no bias.
        sequence_loss: weight of the load-balancing loss of each sequence (DeepSeek-V3, equation 17). global_loss: of
            that of the global batch (Qwen team, arXiv:2501.11873), its loads those of the step before: so every
            microbatch and every device uses the same.
        z_loss: weight of the squared log-partition of the router's logits (ST-MoE, Zoph et al., arXiv:2202.08906).
        capacity: how many of a sequence's tokens an expert takes, over the balanced load; later tokens lose it
            (GShard, arXiv:2006.16668). It is counted by sequence, so that what is dropped does not depend on the
            layout. None: no token loses an expert.
    """

    experts: int
    top_k: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    bias_rate: float = 0.0
    sequence_loss: float = 0.0
    global_loss: float = 0.0
    z_loss: float = 0.0
    capacity: float | None = None

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "experts", "top_k", "groups", "kept_groups", "group_best")
        check_range(self, "[0, inf)", "bias_rate", "sequence_loss", "global_loss", "z_loss")
        check_range(self, "(0, inf)", "scale", "capacity")
        if self.scores not in SCORES:
            raise UserError(f"Routing.scores is {self.scores!r}, which is unknown.{suggest(self.scores, SCORES)}")
        if self.top_k > self.experts:
            raise UserError(f"Routing.top_k is {self.top_k}, and there are {self.experts} experts to choose from")
        if self.capacity is not None and self.capacity >= self.experts / self.top_k:
            raise UserError(
                f"Routing.capacity is {self.capacity}, and from {self.experts / self.top_k:g} on, experts over top_k, "
                "no token loses an expert: set it lower, or to None"
            )
        if self.experts % self.groups:
            raise UserError(f"Routing.groups: {self.experts} experts do not divide into {self.groups} groups")
        if self.kept_groups > self.groups:
            raise UserError(f"Routing.kept_groups is {self.kept_groups}, of {self.groups} groups")
        if self.top_k > self.kept_groups * (self.experts // self.groups):
            raise UserError(
                f"Routing.top_k is {self.top_k}, and {self.kept_groups} of {self.groups} groups have "
                f"{self.kept_groups * (self.experts // self.groups)} experts: raise kept_groups"
            )

    @property
    def of_all_tokens(self) -> tuple[str, ...]:
        """The fields that are set, and by which training depends on all tokens of the batch at once."""
        rates = {
            "bias_rate": self.bias_rate,
            "sequence_loss": self.sequence_loss,
            "global_loss": self.global_loss,
            "z_loss": self.z_loss,
        }
        return tuple(name for name, rate in rates.items() if rate)

    def places(self, seq: int) -> int | None:
        """How many tokens of a sequence of `seq` an expert takes; None for all."""
        return None if self.capacity is None else math.ceil(self.capacity * seq * self.top_k / self.experts)


class Routed(NamedTuple):
    """The experts of each token, `batch seq k` int32, -1 for none; and their weights, float32."""

    chosen: Array
    weights: Array


class Router(nnx.Module):
    """Scores of all experts in float32, and the choice of some of them. `bias`: whether the logits have a trained one.

    Its variables are what the last step saw: the tokens that chose each expert (`load`), how many choices were dropped,
    and the entropy of its scores, summed over tokens. Padding is not routed, and counts for nothing.
    """

    def __init__(self, dims: Dims, routing: Routing, *, bias: bool = False):
        self.routing, self.has_logit_bias = routing, bias
        self.matrix = Param("embed experts", dims)
        if bias:
            self.logit_bias = Param("experts", dims, constant(0.0))
        self.load = Variable("experts", dims, _latest)
        self.dropped, self.entropy = Variable("", dims, _latest), Variable("", dims, _latest)
        if routing.bias_rate:
            self.bias = Variable("experts", dims, _bias_update(routing.bias_rate))

    @jax.named_scope("router")
    def __call__(self, x: Array, is_real: Array) -> tuple[Routed, Auxiliary]:
        """Of `x[batch seq.residual embed]`; `is_real[batch seq]` says which tokens are not padding."""
        real = shard(is_real, STREAM)
        logits = self._logits(x)
        scores = jax.nn.softmax(logits) if self.routing.scores == "softmax" else jax.nn.sigmoid(logits)
        chosen = self._choice(lax.stop_gradient(scores))
        weights = jnp.stack([_of_expert(scores, expert) for expert in _each(chosen)], axis=-1)
        if self.routing.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        is_chosen = real[..., None] & _any_of(chosen, scores)
        kept = self._within_capacity(is_chosen)
        is_kept = jnp.stack([_of_expert(kept, expert) > 0 for expert in _each(chosen)], axis=-1)
        routed = Routed(jnp.where(is_kept, chosen, -1), weights * self.routing.scale)
        return routed, self._auxiliary(logits, scores, real, is_chosen, kept)

    def step_metrics(self, statistics: Mapping[str, Array]) -> dict[str, Array]:
        """What a step reports, from its statistics of all layers: the largest load over the mean, the share of choices
        that were dropped, the entropy of the scores in nats; each the mean over layers."""
        load = statistics["load"]
        total = jnp.maximum(jnp.sum(load, axis=-1), 1)
        return {
            "expert_load": jnp.mean(jnp.max(load, axis=-1) / total) * load.shape[-1],
            "expert_dropped": jnp.mean(statistics["dropped"] / total),
            "router_entropy": jnp.mean(statistics["entropy"] / total) * self.routing.top_k,
        }

    def _logits(self, x: Array) -> Array:
        """`batch seq.residual experts`, the scores of all experts on each device."""
        with axes.exact():
            logits = einsum(f"{STREAM} embed, embed experts -> {STREAM} experts", x.astype(jnp.float32), self.matrix)
            if self.has_logit_bias:
                logits = add(f"{STREAM} experts, experts -> {STREAM} experts", logits, self.logit_bias)
            return shard(logits, f"{STREAM} _experts")

    def _choice(self, scores: Array) -> Array:
        """`batch seq k`: the experts with the largest scores, bias added, of the groups that are kept."""
        routing = self.routing
        if routing.bias_rate:
            scores = scores + self.bias.get_value()
        if routing.kept_groups < routing.groups:
            by_group = scores.reshape(*scores.shape[:2], routing.groups, -1)
            best, _ = lax.top_k(by_group, min(routing.group_best, by_group.shape[-1]))
            _, groups = lax.top_k(jnp.sum(best, axis=-1), routing.kept_groups)
            is_kept = jnp.repeat(_any_of(groups, by_group[..., 0]), by_group.shape[-1], axis=-1)
            scores = jnp.where(is_kept, scores, -jnp.inf)
        return lax.top_k(scores, routing.top_k)[1]

    def _within_capacity(self, is_chosen: Array) -> Array:
        """The choices of `is_chosen[batch seq experts]` for which there is a place, first come first served."""
        places = self.routing.places(is_chosen.shape[1])
        if places is None:
            return is_chosen
        kept = over_positions(lambda chosen: chosen & (jnp.cumsum(chosen, axis=1) <= places), is_chosen)
        return shard(kept, f"{STREAM} _experts")

    def _auxiliary(self, logits: Array, scores: Array, real: Array, is_chosen: Array, kept: Array) -> Auxiliary:
        routing, load = self.routing, jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.float32)
        shares = jnp.where(real[..., None], scores / jnp.sum(scores, axis=-1, keepdims=True), 0)
        entropy = -jnp.sum(shares * jnp.log(jnp.maximum(shares, 1e-30)))
        statistics = {"load": load, "dropped": jnp.sum(load) - jnp.sum(kept, dtype=jnp.float32), "entropy": entropy}
        if routing.bias_rate:
            statistics["bias"] = load
        losses = {}
        if routing.sequence_loss:
            losses["balance"] = routing.sequence_loss * _sequence_balance(shares, is_chosen, real, routing.top_k)
        if routing.global_loss:
            before = self.load.get_value()
            load_share = before / jnp.maximum(jnp.sum(before), 1)
            losses["global_balance"] = routing.global_loss * routing.experts * jnp.sum(shares * load_share)
        if routing.z_loss:
            squared = jnp.square(jax.nn.logsumexp(logits, axis=-1))
            losses["router_z"] = routing.z_loss * jnp.sum(jnp.where(real, squared, 0))
        return Auxiliary(losses, lax.stop_gradient(statistics))


def _sequence_balance(shares: Array, is_chosen: Array, real: Array, top_k: int) -> Array:
    """Σ over sequences of tokens · experts · Σ over experts of (share of the choices · mean share of the scores).

    1 for each token where the load is even. A sequence counts by its tokens, so that the sum over sequences, divided by
    the tokens of the batch, is the mean over them.
    """
    tokens = jnp.maximum(jnp.sum(real, axis=1, dtype=jnp.float32), 1)[:, None]
    chosen = jnp.sum(is_chosen, axis=1, dtype=jnp.float32) / (tokens * top_k)
    return shares.shape[-1] * jnp.sum(chosen * jnp.sum(shares, axis=1))


def _each(chosen: Array) -> list[Array]:
    """`batch seq` of the first choice, of the second, …"""
    return [chosen[..., i] for i in range(chosen.shape[-1])]


def _of_expert(values: Array, expert: Array) -> Array:
    """Of `values[batch seq experts]` that of each token's expert. A sum over a mask: its gradient scatters nothing."""
    own = expert[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(own, values, jnp.zeros((), values.dtype)), axis=-1)


def _any_of(chosen: Array, like: Array) -> Array:
    """`batch seq experts`: whether each is among those chosen, in the shape of `like`."""
    numbers = jnp.arange(like.shape[-1])
    return jnp.any(chosen[..., None] == numbers, axis=-2)


def _latest(value: Array, statistic: Array) -> Array:
    """What the step saw."""
    return statistic


def _bias_update(rate: float) -> Callable[[Array, Array], Array]:
    """Up by `rate` for experts below the mean load, down for those above."""

    def update(bias: Array, load: Array) -> Array:
        return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)

    return update
