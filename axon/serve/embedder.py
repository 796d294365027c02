"""Embeddings: one vector for each text, many texts at once.

A text is padded to the next of a few lengths, which it alone decides, and a batch has texts of one length: there is a
program for each, and all are compiled before the first request. On a CPU a batch is one text, whose bits therefore do
not depend on what else is asked.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.errors import UserError
from axon.nn import Inputs
from axon.runtime import Runtime
from axon.serve.pooling import Pooling
from axon.serve.request import check_ids
from axon.serve.text_model import TextModel
from axon.serve.unsplit import unsplit

SHORTEST = 32
"""Tokens to which the shortest texts are padded; then twice as many, and so on."""

MOST_TOKENS, MOST_TEXTS = 4096, 32
"""Of a batch on an accelerator, padding included; at least one text."""


def is_encoder(module: Any) -> bool:
    """Whether it reads a whole text, and writes none: its `hidden` is that of each token in all of its text."""
    return hasattr(module, "hidden") and not isinstance(module, TextModel)


@dataclass
class _Asked:
    """Texts that were asked for together: how many have no embedding yet."""

    number: int
    found: list[np.ndarray | None]
    missing: int = field(init=False)

    def __post_init__(self):
        self.missing = len(self.found)


@dataclass(frozen=True)
class _Text:
    """One of them, and its place among them."""

    ids: Sequence[int]
    asked: _Asked
    place: int


class TextEncoder:
    """A runtime's module, with its last outputs pooled, compiled for a few padded lengths.

    Args:
        runtime: of an encoder, or of a decoder. parameters, variables: nested by path, in their places.
        pooling: of a text's tokens. max_length: tokens of a text, at most.
    """

    def __init__(self, runtime: Runtime, parameters: Any, variables: Any, pooling: Pooling, max_length: int):
        self.runtime, self.pooling, self.max_length = runtime, pooling, max_length
        self.parameters, self.variables = parameters, variables or {}
        self.width: int = runtime.module.dims["embed"]
        self.lengths = _lengths(max_length)
        self._placement = unsplit(runtime.placement, "batch", "seq")
        self._compiled = runtime.jit(self._embeddings)

    def batch(self, length: int) -> int:
        """Texts of a batch of this padded length."""
        on_cpu = self._placement.platform == "cpu"
        return 1 if on_cpu else max(1, min(MOST_TEXTS, MOST_TOKENS // length))

    def padded(self, tokens: int) -> int:
        """The length of a text with so many tokens, at most `max_length`."""
        return next(length for length in self.lengths if length >= tokens)

    def __call__(self, texts: Sequence[Sequence[int]]) -> Array:
        """Launch those of a batch, all of one padded length: `texts embed` float32, perhaps with more rows."""
        length = self.padded(max(map(len, texts)))
        tokens = np.zeros((self.batch(length), length), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        with self.runtime.tracing(self._placement):
            return self._compiled(self.parameters, self.variables, tokens, lengths)

    def warm_up(self) -> None:
        """Compile all programs."""
        for length in self.lengths:
            jax.block_until_ready(self([[0] * length]))

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return self._compiled._cache_size()

    def _embeddings(self, parameters: Any, variables: Any, tokens: Array, lengths: Array) -> Array:
        model = self.runtime.bind(parameters, variables)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        real = places < lengths[:, None]
        # Padding is at position 0: the largest position of a sequence chooses its frequencies, as LongRoPE's.
        found = (tokens, jnp.where(real, places, 0), jnp.where(real, 0, -1))
        tokens, positions, documents = (axes.shard(one, "batch seq") for one in found)
        hidden, *_ = model.hidden(Inputs(tokens, positions, documents))
        return self.pooling.pooled(axes.reshard(hidden, PartitionSpec(None, None, None)), lengths)


class Embedder:
    """Embeds texts, a batch of each encoder a step; to be called from one thread.

    Args:
        encoders: of the same model, each on devices of its own.
    """

    def __init__(self, encoders: Sequence[TextEncoder]):
        self.encoders = tuple(encoders)
        one = self.encoders[0]
        self.pooling, self.max_length, self.width = one.pooling, one.max_length, one.width
        self.vocab: int = getattr(one.runtime.module, "vocab", None) or one.runtime.module.dims["vocab"]
        self._waiting: dict[int, deque[_Text]] = {length: deque() for length in one.lengths}
        self._asked: dict[int, _Asked] = {}
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether a text waits."""
        return bool(self._asked)

    def submit(self, texts: Sequence[Sequence[int]]) -> int:
        """Ids of each text: the number by which `step` names them. Raises `UserError` for what cannot be embedded."""
        if not texts:
            raise UserError("There is no text to embed; give at least one")
        for ids in texts:
            if not 1 <= len(ids) <= self.max_length:
                raise UserError(f"a text of {len(ids)} tokens; must have at least 1 and at most {self.max_length}")
            check_ids(ids, self.vocab, None, "a text")
        self._submitted += 1
        asked = self._asked[self._submitted] = _Asked(self._submitted, [None] * len(texts))
        for place, ids in enumerate(texts):
            self._waiting[self.encoders[0].padded(len(ids))].append(_Text(ids, asked, place))
        return self._submitted

    def cancel(self, number: int) -> None:
        """Drop a request that is not wanted any more."""
        if self._asked.pop(number, None):
            for length, texts in self._waiting.items():
                self._waiting[length] = deque(text for text in texts if text.asked.number != number)

    def step(self) -> Mapping[int, list[np.ndarray]]:
        """Embed some of those that wait; of what was asked together and is complete, the embeddings."""
        batches = [texts for encoder in self.encoders if (texts := self._next(encoder))]
        launched = [
            encoder([text.ids for text in texts]) for encoder, texts in zip(self.encoders, batches, strict=False)
        ]
        complete = {}
        for texts, embeddings in zip(batches, map(np.asarray, launched), strict=True):
            for text, embedding in zip(texts, embeddings[: len(texts)], strict=True):
                asked = text.asked
                asked.found[text.place], asked.missing = embedding, asked.missing - 1
                if not asked.missing:
                    complete[asked.number] = self._asked.pop(asked.number).found
        return complete

    def warm_up(self) -> None:
        """Compile all programs."""
        for encoder in self.encoders:
            encoder.warm_up()

    def _next(self, encoder: TextEncoder) -> list[_Text]:
        """The text that has waited longest, and others of its length."""
        waiting = [texts for texts in self._waiting.values() if texts]
        if not waiting:
            return []
        texts = min(waiting, key=lambda texts: (texts[0].asked.number, texts[0].place))
        length = encoder.padded(len(texts[0].ids))
        return [texts.popleft() for _ in range(min(len(texts), encoder.batch(length)))]


def _lengths(most: int) -> list[int]:
    """The lengths that texts are padded to: twice as many tokens each, the last one `most`."""
    found = [min(SHORTEST, most)]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found
