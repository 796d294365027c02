"""The most likely next tokens of given texts, with their log-probabilities: a teacher's distributions for a file."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax import Array, lax

from axon import axes
from axon.runtime import Runtime
from axon.serve.score import Forced
from axon.serve.teacher_forcing import SHORTEST, Continuation


class TopLogprobs(Forced):
    """The `top` most likely ids in the place of each token of continuations, see `Forced`; the logits of `SHORTEST`
    positions of a batch exist at once."""

    def __init__(self, runtime: Runtime, max_length: int, top: int):
        super().__init__(runtime, max_length)
        self.top, self._compiled = top, runtime.jit(self._likeliest)

    def __call__(
        self, parameters: Any, variables: Any, continuations: Sequence[Continuation]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The place of each continuation, the ids and their log-probabilities in nats, `tokens top`; the longest first.

        Raises `ValueError` as `batches` does.
        """
        for places, batch in self.batches(continuations):
            with self.runtime.tracing(self.placement):
                found = self._compiled(parameters, variables or {}, batch)
            ids, logprobs = (np.asarray(value) for value in jax.device_get(found))
            for row, place in enumerate(places):
                own = batch["weights"][row] > 0
                yield place, ids[row][own], logprobs[row][own]

    def _likeliest(self, parameters: Any, variables: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
        """`batch seq top` each."""
        model = self.runtime.bind(parameters, variables)
        x = axes.shard(self.hidden(model, batch), "batch seq embed")
        size = SHORTEST if x.shape[1] % SHORTEST == 0 else x.shape[1]
        blocks = rearrange(x, "batch (blocks seq) embed -> blocks batch seq embed", seq=size)

        def each(x: Array) -> tuple[Array, Array]:
            logits = axes.shard(model.output.logits(x), "batch seq vocab.whole")
            logprobs, ids = lax.top_k(jax.nn.log_softmax(logits.astype("float32")), self.top)
            return ids, logprobs

        ids, logprobs = (
            rearrange(one, "blocks batch seq top -> batch (blocks seq) top") for one in lax.map(each, blocks)
        )
        return ids, logprobs
