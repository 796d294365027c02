"""Log-likelihoods of continuations: how likely a model finds given tokens after others, and whether greedy decoding
would have taken them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.nn import token_nll
from axon.runtime import Runtime
from axon.serve.logits import row_shards
from axon.serve.teacher_forcing import Arrays, Continuation, teacher_forcing
from axon.serve.unsplit import unsplit

SEQUENCES = 8
"""Sequences of a batch, or the next multiple of the devices that split it."""


@dataclass(frozen=True)
class Score:
    """Of a continuation: the sum of its tokens' log-probabilities in nats, and whether each was the most likely."""

    log_likelihood: float
    is_greedy: bool


class Forced:
    """Reads continuations with a runtime's module and mesh; sequences are split over devices, positions are not.

    A program is compiled for each padded length, and cached. An encoder–decoder reads contexts and writes
    continuations.

    Args:
        max_length: positions of a sequence, at most.
    """

    def __init__(self, runtime: Runtime, max_length: int):
        self.runtime, self.max_length = runtime, max_length
        self.forced, self.placement = teacher_forcing(runtime.module), unsplit(runtime.placement, "seq")
        split = row_shards(self.placement)
        self.batch = -(-SEQUENCES // split) * split

    def batches(self, continuations: Sequence[Continuation]) -> Iterator[tuple[list[int], Arrays]]:
        """The places of a batch's continuations, and its arrays, the longest first.

        Raises `ValueError` for a continuation of no tokens, without a context, or with more than `max_length`
        positions.
        """
        for one in continuations:
            if not one.context or not one.tokens or self.forced.positions(one) > self.max_length:
                sizes = f"{len(one.tokens)} tokens after {len(one.context)}"
                raise ValueError(f"a continuation of {sizes}: expected 1 or more of both, {self.max_length} positions")
        order = sorted(range(len(continuations)), key=lambda place: -self.forced.positions(continuations[place]))
        for first in range(0, len(order), self.batch):
            places = order[first : first + self.batch]
            yield places, self.forced.padded([continuations[place] for place in places], self.batch, self.max_length)

    def hidden(self, model: Any, batch: dict[str, Array]) -> Array:
        """See `TeacherForcing.hidden`, of arrays that are on the devices yet."""
        return self.forced.hidden(model, {name: axes.shard(value, "batch seq") for name, value in batch.items()})


class Scorer(Forced):
    """Scores continuations, see `Forced`."""

    def __init__(self, runtime: Runtime, max_length: int):
        super().__init__(runtime, max_length)
        self._compiled = runtime.jit(self._score, static_argnames="greedy")

    def __call__(
        self, parameters: Any, variables: Any, continuations: Sequence[Continuation], *, greedy: bool = True
    ) -> Iterator[tuple[int, Score]]:
        """The place of each continuation and its score, the longest first.

        `greedy`: whether to tell what greedy decoding takes, for which the logits of a batch exist all at once; without
        it `Score.is_greedy` is False. Raises `ValueError` as `batches` does.
        """
        for places, batch in self.batches(continuations):
            with self.runtime.tracing(self.placement):
                found = self._compiled(parameters, variables or {}, batch, greedy=greedy)
            nll, taken = (np.asarray(value) for value in jax.device_get(found))
            for row, place in enumerate(places):
                yield place, Score(-float(nll[row]), bool(taken[row]))

    def _score(self, parameters: Any, variables: Any, batch: dict[str, Array], greedy: bool) -> tuple[Array, Array]:
        """Of each sequence the negative log-likelihood of the tokens that count, and whether all are the top ones."""
        model = self.runtime.bind(parameters, variables)
        hidden = self.hidden(model, batch)
        nll, _ = token_nll(hidden, model.output, batch["targets"])
        total, real = jnp.sum(nll * batch["weights"], axis=1), batch["weights"] > 0
        if not greedy:
            return total, jnp.zeros(total.shape, bool)
        top = jnp.argmax(axes.shard(model.output.logits(hidden), "batch seq vocab.whole"), axis=-1)
        return total, jnp.all((top == batch["targets"]) | ~real, axis=1)
