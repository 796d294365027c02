"""What is asked of the engine, and what it answers: plain data, which every way in to it speaks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np

from axon.checks import check_range
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError


def check_ids(ids: Sequence[int], vocab: int, tokenizer: Tokenizer | None, what: str) -> None:
    """Raise `UserError` for an id of `what` that a model of `vocab` ids has not: its tokenizer may have more."""
    if (wrong := next((token for token in ids if not 0 <= token < vocab), None)) is not None:
        text = "" if tokenizer is None or wrong < 0 else f" ({tokenizer.decode([wrong])!r})"
        raise UserError(f"{what} has the id {wrong}{text}; this model's are from 0 to {vocab - 1}")


@dataclass(frozen=True)
class Sampling:
    """How the tokens that follow a prompt are drawn, and when they end.

    Args:
        tokens: how many to generate, at most. temperature: divides the logits; 0 is greedy. top_k: sample from the
            k most likely only. top_p: of these, sample from the smallest set with this fraction of their probability
            (arXiv:1904.09751). min_p: sample only tokens with at least this fraction of the most likely token's
            probability (arXiv:2407.01082). seed: of the samples; a request's are the same whatever runs beside it.
        repetition_penalty: divides the positive logits of the tokens that prompt and text have had, and multiplies the
            negative ones (arXiv:1909.05858). presence_penalty, frequency_penalty: what is subtracted from the logit
            of a token that the text has had, once and each time. logit_bias: id → what is added to its logit.
        logprobs: of the token drawn and of so many most likely the log-probabilities, in nats, of the distribution that
            the model gives: before the temperature, penalties and filters. None: none.
        stop: texts at the first of which generation ends, and which are left out. stop_ids: ids, likewise.
        min_tokens: so many tokens are drawn before an id or a stop text may end the text. ignore_eos: the tokenizer's
            ends do not end it, and `stop_ids` still do.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "tokens", "top_k")
        check_range(self, "[0, 1e6]", "temperature")  # beyond, float32 has all logits equal
        check_range(self, "(0, 1]", "top_p")
        check_range(self, "[0, 1]", "min_p")
        check_range(self, "[0, 2**64)", "seed")
        check_range(self, "[1e-6, 1e6]", "repetition_penalty")  # beyond, logits become infinite
        check_range(self, "[-2, 2]", "presence_penalty", "frequency_penalty")
        check_range(self, "[0, 20]", "logprobs")
        if not 0 <= self.min_tokens <= self.tokens:
            raise UserError(
                f"Sampling.min_tokens is {self.min_tokens}; must be from 0 to tokens, which is {self.tokens}"
            )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or abs(bias) > 100:
                raise UserError(f"Sampling.logit_bias of token {token} is {bias}; must be from -100 to 100")
        if any(not text for text in self.stop):
            raise UserError("Sampling.stop has an empty text, which is everywhere; leave it out")

    def of_choice(self, number: int) -> "Sampling":
        """Of one of several texts that have a seed in common; of number 0 this one.

        No two pairs of a seed and a number are expected to have the same noise, which seeds that count upward would
        have: choice 1 of seed 5 is not choice 0 of seed 6.
        """
        if not number:
            return self
        words = np.random.SeedSequence(self.seed, spawn_key=(number,)).generate_state(1, np.uint64)
        return replace(self, seed=int(words[0]))

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens came before it, beyond what the model makes of them."""
        penalties = self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0
        return any(penalties)


class Grammar(Protocol):
    """Which token may come next; of one request, and told of each of its tokens."""

    def allowed(self) -> np.ndarray:
        """Bits of the ids that may come next, uint32 `ceil(vocab / 32)`, the lowest bit the first id."""
        ...

    def accept(self, ids: Sequence[int]) -> int:
        """Go on by the longest part of `ids` that is allowed: how many. After an end nothing is."""
        ...

    def copy(self) -> "Grammar":
        """Another in the same state."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may follow."""
        ...


@dataclass(frozen=True)
class Request:
    """Tokens to continue.

    Args:
        prompt: ids, at least one. sampling: how.
        priority: the higher comes first; of the same, the one that was asked earlier.
        grammar: what the text has to be. prompt_logprobs: whether to give those of the prompt, too.
        adapter: the name of one that the engine has loaded; None: the model as it is.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    adapter: str | None = None

    def __post_init__(self):
        if not self.prompt:
            raise UserError("Request.prompt has no tokens; give at least one, as the beginning-of-document token")
        if self.grammar is not None and (self.sampling.min_tokens or self.sampling.ignore_eos):
            raise UserError("a text of a grammar ends where the grammar does: leave min_tokens and ignore_eos out")


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A token or text that ends it, or its grammar's end."""
    LENGTH = "length"
    """As many tokens as were asked for, or as the model has positions."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The engine could not go on with it: see `Update.error`."""


@dataclass(frozen=True)
class TokenLogprob:
    """In nats, of a token and of the most likely ones in its place, the most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Update(NamedTuple):
    """What is new of a request; a tuple, as a step has one for each sequence and its host time is short.

    Args:
        request: its number, of `Engine.submit`. ids: new tokens, one that ends the text included. text: new text, of
            whole characters, with no part of a stop text; empty without a tokenizer.
        logprobs: of `ids`, where they were asked for. prompt_logprobs: of the prompt's tokens but the first, likewise,
            with the first token.
        finish: why it ended; None: there will be more. error: what went wrong, if `finish` is `FAILED`.
        cached: of the prompt's tokens, how many were in the cache already.
    """

    request: int
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: str | None = None
    cached: int = 0
