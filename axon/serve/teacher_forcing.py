"""Batches in which a model is given every token of a continuation, so that one pass predicts all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.nn import Inputs
from axon.serve.text_model import EncoderDecoder

SHORTEST = 64
"""Sequences are padded to this length, or to it times a power of two: few lengths, so that few programs compile."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Continuation:
    """Ids `tokens` after the ids `context`, of which there is at least one."""

    context: Sequence[int]
    tokens: Sequence[int]


def teacher_forcing(module: Any) -> "TeacherForcing":
    """The teacher forcing of a module's kind."""
    return InTwoSequences(module.start_id) if isinstance(module, EncoderDecoder) else TeacherForcing()


class TeacherForcing:
    """Of a decoder-only model: context and continuation follow each other; the last token is only predicted."""

    def positions(self, one: Continuation) -> int:
        """Of the longest sequence that it makes."""
        return len(one.context) + len(one.tokens) - 1

    def padded(self, continuations: Sequence[Continuation], batch: int, most: int) -> Arrays:
        """Arrays `batch seq`, with rows of padding where there are fewer continuations, and `most` positions at most.

        Among them `targets`, the ids to predict, and `weights`, 1 for those of a continuation, else 0.
        """
        arrays = _padding(batch, max(map(self.positions, continuations)), most)
        for row, one in enumerate(continuations):
            _fill(arrays, row, [*one.context, *one.tokens], len(one.context) - 1)
        return arrays

    def hidden(self, model: Any, batch: dict[str, Array]) -> Array:
        """What the model's head predicts the targets of such a batch from, `batch seq.residual embed`."""
        tokens = batch["tokens"]
        # Padding is at position 0: the largest position of a sequence chooses its frequencies, as LongRoPE's.
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = axes.shard(jnp.where(batch["documents"] < 0, 0, places), "batch seq")
        return model.hidden(Inputs(tokens, positions, batch["documents"]))[0]


@dataclass(frozen=True)
class InTwoSequences(TeacherForcing):
    """An encoder–decoder: its encoder reads the context, and its decoder is given `start_id` and the continuation."""

    start_id: int

    def positions(self, one: Continuation) -> int:
        return max(len(one.context), len(one.tokens))

    def padded(self, continuations: Sequence[Continuation], batch: int, most: int) -> Arrays:
        arrays = _padding(batch, max(len(one.tokens) for one in continuations), most)
        read = _padding(batch, max(len(one.context) for one in continuations), most)
        for row, one in enumerate(continuations):
            _fill(arrays, row, [self.start_id, *one.tokens], 0)
            read["tokens"][row, : len(one.context)] = one.context
            read["documents"][row, : len(one.context)] = 0
        return arrays | {"read": read["tokens"], "read_documents": read["documents"]}

    def hidden(self, model: Any, batch: dict[str, Array]) -> Array:
        read, documents, tokens = batch["read"], batch["read_documents"], batch["tokens"]
        encoded, _ = model.encode(Inputs(read, jnp.zeros_like(read), documents))
        return model.decode(Inputs(tokens, jnp.zeros_like(tokens), batch["documents"]), encoded, documents)[0]


def _padding(batch: int, length: int, most: int) -> Arrays:
    """Arrays of padding alone: `documents` is -1 and `weights` 0."""
    shape = batch, min(SHORTEST * 2 ** math.ceil(math.log2(max(1, length / SHORTEST))), most)
    ids = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets")}
    return ids | {"documents": np.full(shape, -1, np.int32), "weights": np.zeros(shape, np.float32)}


def _fill(arrays: Arrays, row: int, ids: Sequence[int], first: int) -> None:
    """Put a sequence into a row: each id but the last, with the next one as its target; those from `first` on count."""
    length = len(ids) - 1
    arrays["tokens"][row, :length], arrays["targets"][row, :length] = ids[:-1], ids[1:]
    arrays["documents"][row, :length] = 0
    arrays["weights"][row, first:length] = 1
