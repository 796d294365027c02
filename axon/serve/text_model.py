"""What serving asks of a model that writes texts: one that goes on with a prompt, or an encoder–decoder, which reads it
and writes an answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.nn import Depth, Head, Inputs, LanguageModel
from axon.serve.policy import check_token_ids
from axon.serve.request import Request, check_ids


@runtime_checkable
class TextModel(Protocol):
    """A module that writes text: an `axon.nn.LanguageModel`, or an `EncoderDecoder`.

    `max_length`: how many positions a sequence may have; None for any number. `start_id`: what an answer begins with,
    which is left out; None: the text goes on from the prompt. `vocab`: how many ids it predicts; None: all of the axis,
    of which `dims` has the size. `tied`: whether the head is the table of embeddings. `has_mtp`: whether it has a
    block that predicts the token after the next.
    """

    max_length: int | None
    start_id: int | None
    vocab: int | None
    tied: bool
    has_mtp: bool

    @property
    def dims(self) -> Mapping[str, int]:
        """Sizes of the named axes."""
        ...

    @property
    def layers(self) -> Depth:
        """The blocks that write, which declare a cache."""
        ...

    @property
    def output(self) -> Head:
        """The module that makes logits of `hidden`."""
        ...

    def hidden(self, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Any]:
        """See `axon.nn.LanguageModel.hidden`."""
        ...

    def flops_by_part(self, seq: int) -> dict[str, int]:
        """See `axon.nn.LanguageModel.flops_by_part`; of an encoder–decoder also of the `encoder`, a token it reads."""
        ...


@runtime_checkable
class EncoderDecoder(TextModel, Protocol):
    """An encoder–decoder, as `models.t5.T5` builds one."""

    start_id: int  # pyright: ignore[reportIncompatibleVariableOverride] - narrower than of `TextModel`: never None

    def encode(self, inputs: Inputs) -> tuple[Array, Any]:
        """What the encoder makes of what is read, `batch seq.residual embed`, and auxiliary terms."""
        ...

    def decode(self, inputs: Inputs, encoded: Array, documents: Array | None) -> tuple[Array, Any]:
        """What `output` predicts the ids from that follow each of `inputs`, `batch seq.residual embed`, and auxiliary
        terms. `documents[batch seq]`: of what was read, -1 where it is padding."""
        ...

    def encoded_states(self, encoded: Array, lens: Array) -> dict[str, dict[str, Array]]:
        """By kind of block the constant states of its cache: what a decoder keeps of `encoded`, of which the first
        `lens[batch]` positions of each sequence are real. A length may be any up to that of the cache."""
        ...


def check_writes(model: Any) -> None:
    """Raise `UserError` for a module that writes no text, as an encoder or a classifier of texts."""
    if not isinstance(model, TextModel):
        raise UserError(
            f"a {type(model).__name__} cannot write a text: generation needs an axon.nn.LanguageModel, which predicts "
            "the next token, or an encoder–decoder as models.t5.T5 builds one"
        )
    if isinstance(model, LanguageModel) and not model.predicts_tokens:
        raise UserError(
            f"this model (Train.model of a run) has {' and '.join(model.on_top)} in the place of a head for tokens: it "
            "predicts none, and cannot write a text. Name the run, or the model, that it was made of"
        )


def check_request(model: Any, request: Request, tokenizer: Tokenizer | None = None) -> None:
    """Raise `UserError` if `model` writes no text, its positions are too few for a prompt and all tokens that are asked
    for, or it has not the ids of the prompt, whose text is then that of `tokenizer`, or of `Sampling`'s biases and
    stop ids."""
    check_writes(model)
    prompt, tokens, needed = len(request.prompt), request.sampling.tokens, positions(model, request)
    if model.max_length is not None and needed > model.max_length:
        raise UserError(
            f"a prompt of {prompt} tokens and {tokens} more need {needed} positions, and this model has "
            f"{model.max_length}: shorten the prompt, or lower Sampling.tokens"
        )
    check_ids(request.prompt, vocab_of(model), tokenizer, "the prompt")
    check_token_ids(request.sampling, vocab_of(model))


def vocab_of(model: TextModel) -> int:
    """How many ids it predicts."""
    return model.vocab or model.dims["vocab"]


def positions(model: TextModel, request: Request) -> int:
    """How many positions a request needs with all its text; of an encoder–decoder, whose two sequences have as many
    each, the longer one."""
    prompt, tokens = len(request.prompt), request.sampling.tokens
    return prompt + tokens if model.start_id is None else max(prompt, 1 + tokens)


def room(model: TextModel, prompt: int, most: int) -> int:
    """How many tokens may follow a prompt of so many, where sequences have `most` positions: below 1, none."""
    return most - prompt if model.start_id is None else most - 1 if prompt <= most else 0


def as_decoded(model: TextModel, request: Request) -> tuple[Request, tuple[int, ...]]:
    """A request as the decoder has it, and the ids that an encoder reads before: of an encoder–decoder `start_id` and
    the prompt. Raises `UserError` where the log-probabilities of these are asked for."""
    if model.start_id is None:
        return request, ()
    if request.prompt_logprobs:
        raise UserError(
            "Request.prompt_logprobs is set, and an encoder–decoder predicts no token of what it reads; leave "
            "prompt_logprobs (echo with logprobs) out"
        )
    return replace(request, prompt=(model.start_id,)), request.prompt


def encoder_inputs(tokens: Array, lens: Array) -> Inputs:
    """The inputs of an encoder that reads the first `lens[batch]` of `tokens[batch seq]`: the others are padding."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    documents = axes.shard(jnp.where(places < lens[:, None], 0, -1), "batch seq")
    return Inputs(axes.shard(tokens, "batch seq"), axes.shard(places, "batch seq"), documents)
