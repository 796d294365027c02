"""The encoder of an encoder–decoder that is served: a request's text is read once, and what the decoder attends to of
it is a state of the request."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence
from axon.serve.step import Step
from axon.serve.text_model import EncoderDecoder, encoder_inputs

SHORTEST = 64
"""Texts are padded to so many tokens, or to that times a power of two: few lengths, so that few programs compile."""


class EncoderStep:
    """One text at a time through the encoder, into the constant states of its sequence's slot. Of a model without an
    encoder there are no texts, and nothing is done.

    Args:
        step: of the decoder, with its cache.
    """

    def __init__(self, step: Step):
        self._step = step
        self.lengths = padded_lengths(step.length) if isinstance(step.runtime.module, EncoderDecoder) else ()
        self._write = step.jit(self._written, donate_argnames="cache")

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return self._write._cache_size()

    def write(
        self,
        parameters: Any,
        variables: Any,
        cache: Any,
        parts: Iterable[Scheduled],
        slot_of: Callable[[Sequence], int],
    ) -> Any:
        """`cache`, which is donated, with the texts of those sequences whose first step is launched now."""
        for sequence in (part.sequence for part in parts if part.begins and part.sequence.source):
            cache = self._launched(parameters, variables, cache, sequence.source, slot_of(sequence))
        return cache

    def warm_up(self, parameters: Any, variables: Any, cache: Any) -> Any:
        """Compile the programs of all lengths."""
        for length in self.lengths:
            cache = self._launched(parameters, variables, cache, (0,) * length, 0)
        return jax.block_until_ready(cache)

    def traced(self, parameters: Any, variables: Any, cache: Any, tokens: Any, number: Any) -> Any:
        """The program of texts of as many tokens, as `Step.traced`; `number`: as a count and a slot are."""
        with self._tracing():
            return self._write.trace(parameters, variables, cache=cache, tokens=tokens, count=number, slot=number)

    def _launched(self, parameters: Any, variables: Any, cache: Any, source: tuple[int, ...], slot: int) -> Any:
        tokens = np.zeros((1, next(length for length in self.lengths if length >= len(source))), np.int32)
        tokens[0, : len(source)] = source
        with self._tracing():
            return self._write(
                parameters, variables, cache=cache, tokens=tokens, count=np.int32(len(source)), slot=np.int32(slot)
            )

    def _tracing(self) -> Any:
        """As `Step.tracing`, without blocks of rows: a text is alone in its program, and so has the same bits."""
        return self._step.runtime.tracing(self._step.placement)

    def _written(
        self, parameters: Any, variables: Any, cache: Any, tokens: Array, count: Array, slot: Array
    ) -> dict[str, dict[str, Array]]:
        """`cache` with the first `count` of `tokens[1 seq]` as the encoder reads them, in a slot."""
        model: EncoderDecoder = self._step.runtime.bind(parameters, variables)
        lens = count[None]
        encoded, _ = model.encode(encoder_inputs(tokens, lens))
        states = model.encoded_states(encoded, lens)
        return {kind: own | _in_slot(own, states.get(kind, {}), slot) for kind, own in cache.items()}


def padded_lengths(most: int) -> tuple[int, ...]:
    """Of texts of at most so many tokens."""
    lengths = [min(SHORTEST, most)]
    while lengths[-1] < most:
        lengths.append(min(2 * lengths[-1], most))
    return tuple(lengths)


def _in_slot(cached: dict[str, Array], states: dict[str, Array], slot: Array) -> dict[str, Array]:
    """The arrays `layers batch …` of a cache with these states `layers 1 …`, of which a text may be shorter."""

    def one(name: str, state: Array) -> Array:
        start = (0, slot, *(0 for _ in state.shape[2:]))
        return lax.dynamic_update_slice(cached[name], state.astype(cached[name].dtype), start)

    return {name: one(name, state) for name, state in states.items()}
