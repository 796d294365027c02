"""Texts of models that the engine does not serve, encoder–decoders: one prompt at a time, with a cache for it alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.nn import Head
from axon.runtime import Runtime
from axon.serve.policy import check_bias, draws
from axon.serve.request import Request, Update, check_ids
from axon.serve.sampler import draw, on_host
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence
from axon.serve.stream import Stream
from axon.serve.unsplit import unsplit

PADDED = 64
"""What an encoder reads, and the room for texts, are padded to a multiple of this, so that lengths share programs. A
prompt that is gone on from is not padded: a block that remembers a state of its own would have the padding in it."""


@runtime_checkable
class Generative(Protocol):
    """A module that writes text: an `axon.nn.LanguageModel`, or an encoder–decoder, which answers a prompt.

    `max_length`: how many positions prompt and text may have; None for any number. `start_id`: what an answer begins
    with, which is left out; None: the text goes on from the prompt. `vocab`: how many ids it predicts; None: all of
    the axis, of which `dims` has the size.
    """

    max_length: int | None
    start_id: int | None
    vocab: int | None
    dims: Mapping[str, int]

    @property
    def output(self) -> Head:
        """The module that makes logits."""
        ...

    def prefill(self, tokens: Array, length: Array, room: int) -> tuple[Array, Any]:
        """See `axon.nn.LanguageModel.prefill`."""
        ...

    def advance(self, ids: Array, state: Any) -> tuple[Array, Any]:
        """See `axon.nn.LanguageModel.advance`."""
        ...


class UnpagedWriter:
    """Answers requests one by one, by a runtime's module and mesh, its parameters in place; a sequence is not split.

    Programs are compiled for each length of a prompt (of an encoder–decoder's, each padded one), and for each padded
    length of a text, and cached.

    Args:
        runtime: of a `Generative` module. parameters, variables: nested by path, in their places.
        tokenizer: for texts, and for the ids that end them; without one updates have ids alone.
    """

    def __init__(self, runtime: Runtime, parameters: Any, variables: Any = None, *, tokenizer: Tokenizer | None = None):
        """Raises `UserError` for a module that writes no text, as an encoder."""
        check_writes(runtime.module)
        self.runtime, self.tokenizer = runtime, tokenizer
        self._weights = parameters, variables or {}
        self._placement = unsplit(runtime.placement, "batch", "seq")
        # A run's `Execution.kernels` are those of training; of generation's own there is only sampling.
        kernels = {name: kernel for name, kernel in runtime.execution.kernels.items() if name == "sampling"}
        self._execution = replace(runtime.execution, kernels=kernels)
        self._prefill = runtime.jit(self._first_logits, static_argnames="room")
        self._advance = runtime.jit(self._next_logits, donate_argnames="state")
        self._draw = runtime.jit(draw)

    def stream(self, request: Request) -> Iterator[Update]:
        """The updates of a request as they come, a token each; the prompt's log-probabilities are not among them."""
        model: Generative = self.runtime.module
        check_request(model, request, self.tokenizer)
        begun = request.prompt if model.start_id is None else (model.start_id,)
        sequence, vocab = Sequence(replace(request, prompt=begun), 1, 1), vocab_of(model)
        stream, update = Stream(sequence, vocab, self.tokenizer), None
        while update is None or update.finish is None:
            with self.runtime.tracing(self._placement, self._execution):
                if update is None:
                    logits, state = self._prefill(*self._weights, *_padded(model, request.prompt), room=_room(request))
                else:
                    logits, state = self._advance(*self._weights, np.array([update.ids], np.int32), state=state)
                part = Scheduled(sequence, len(sequence.tokens) - 1, 1, (), 1, draws=True, from_device=False)
                drawn = on_host(self._draw(logits, draws(stream.rows(part), 1, vocab)))
            ids = stream.accepted(part, drawn, 0)
            sequence.tokens += ids
            update = stream.update(part, ids, drawn, 0)
            assert update is not None  # its part draws
            yield update

    def _first_logits(
        self, parameters: Any, variables: Any, tokens: Array, length: Array, room: int
    ) -> tuple[Array, Any]:
        """`batch vocab`, of the first new id; `tokens[1, padded]`, the first `length` of them real."""
        model: Generative = self.runtime.bind(parameters, variables)
        last, state = model.prefill(tokens, length, room)
        return _logits(model, last), state

    def _next_logits(self, parameters: Any, variables: Any, ids: Array, state: Any) -> tuple[Array, Any]:
        """The same after one more id."""
        model: Generative = self.runtime.bind(parameters, variables)
        last, state = model.advance(ids, state)
        return _logits(model, last), state


def check_writes(model: Any) -> None:
    """Raise `UserError` for a module that writes no text, as an encoder."""
    if not isinstance(model, Generative):
        raise UserError(
            f"a {type(model).__name__} cannot write a text: generation needs an axon.nn.LanguageModel, which predicts "
            "the next token, or an encoder–decoder as models.t5.T5 builds one"
        )


def check_request(model: Any, request: Request, tokenizer: Tokenizer | None = None) -> None:
    """Raise `UserError` if `model` writes no text, its positions are too few for a prompt and all tokens that are asked
    for, or it has not the ids of the prompt, whose text is then that of `tokenizer`, or of `Sampling.logit_bias`."""
    check_writes(model)
    prompt, tokens = len(request.prompt), request.sampling.tokens
    if model.max_length is not None and prompt + tokens > model.max_length:
        raise UserError(
            f"a prompt of {prompt} tokens and {tokens} more need {prompt + tokens} positions, and this model has "
            f"{model.max_length}: shorten the prompt, or lower Sampling.tokens"
        )
    check_ids(request.prompt, vocab_of(model), tokenizer, "the prompt")
    check_bias(request.sampling, vocab_of(model))


def vocab_of(model: Generative) -> int:
    """How many ids it predicts."""
    return model.vocab or model.dims["vocab"]


def _logits(model: Generative, last: Array) -> Array:
    return axes.shard(model.output.logits(last)[:, 0].astype(jnp.float32), "batch vocab.whole")


def _padded(model: Generative, prompt: tuple[int, ...]) -> tuple[np.ndarray, np.int32]:
    """`tokens[1, padded]`, at most as many as the model has positions, and how many are real."""
    size = len(prompt) if model.start_id is None else _multiple(len(prompt))
    size = min(size, model.max_length or size)
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(prompt)] = prompt
    return tokens, np.int32(len(prompt))


def _room(request: Request) -> int:
    return _multiple(request.sampling.tokens)


def _multiple(count: int) -> int:
    return -(-count // PADDED) * PADDED
