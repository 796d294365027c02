"""Which part of a chat the assistant writes: spans of the rendered text, and from them ids."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.special import Hiding
from axon.serve.template import MARKS, Template

ASSISTANT, WEIGHT = "assistant", "weight"
Span = tuple[int, int]
"""From which character to which, the second not included."""


@dataclass(frozen=True)
class Renderer:
    """A template with all that it is given of a chat but the messages, `shared`; special tokens are hidden."""

    template: Template
    hiding: Hiding
    shared: Mapping[str, Any]

    def __call__(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of messages that are hidden."""
        given = {"messages": [*messages], "add_generation_prompt": False}
        return self.template.render({**self.shared, **given, **variables})


@dataclass(frozen=True)
class Turns:
    """The ids of a chat; `weights`: how much each counts that the assistant writes, 0 of the others."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def learned(self) -> tuple[bool, ...]:
        """Which of the ids count."""
        return tuple(weight > 0 for weight in self.weights)

    @classmethod
    def of(
        cls,
        located: Sequence[tuple[int, int, int]],
        spans: Mapping[Span, float],
        tokenizer: Tokenizer,
        parts: Mapping[Span, float] = MappingProxyType({}),
    ) -> "Turns":
        """Of the ids, each with where it is in the text, those that begin in one of the spans, with its weight; or
        with that of one of its `parts`, if it begins there.

        White space after a special token there is the template's, and not learned; a token that ends texts and follows
        a span at once is. Where the text ends in a span without a special token, such an end is put after it, so that
        the model learns to stop.
        """
        ids, weights = [token for token, *_ in located], [0.0] * len(located)
        for (begin, end), weight in spans.items():
            own = [place for place, (_, start, stop) in enumerate(located) if begin <= start < end and stop > start]
            if not own:
                continue
            closed = _closed(tokenizer, [ids[place] for place in own])
            for place in own[: closed or len(own)]:
                at = located[place][1]
                weights[place] = next((of_part for (low, high), of_part in parts.items() if low <= at < high), weight)
            after = own[-1] + 1
            if not closed and after == len(ids):
                ids.append(tokenizer.bos if tokenizer.bos in tokenizer.ends else min(tokenizer.ends))
                weights.append(weight)
            elif not closed and ids[after] in tokenizer.ends:
                weights[after] = weight
        return cls(tuple(ids), tuple(weights))


def _closed(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many of a turn's ids there are up to a special token that only white space follows; 0 without one."""
    special = [place for place, token in enumerate(ids) if not tokenizer.byte_lengths[token]]
    if not special or tokenizer.visible(ids[special[-1] + 1 :]).strip():
        return 0
    return special[-1] + 1


def marked_spans(render: Renderer, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Span]]:
    """The text of the messages, and the spans that the template marks in it."""
    begin, end = secrets.token_hex(16), secrets.token_hex(16)
    first, *marked = render(messages, **dict(zip(MARKS, (begin, end), strict=True))).split(begin)
    text, spans = first, []
    for part in marked:
        own, _, after = part.partition(end)
        spans.append((len(text), len(text) + len(own)))
        text += own + after
    return text, spans


def turn_spans(render: Renderer, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Span]]:
    """The text of the messages, and where in it each of the assistant's is: after the prompt that opens it."""
    text, spans = render(messages), []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        if not number:
            raise UserError("messages[0].role is 'assistant', which answers nothing: put what it answers before it")
        before = render(messages[:number], add_generation_prompt=True)
        is_last = number + 1 == len(messages)
        end = len(text) if is_last else _shared_length(text, render(messages[: number + 1]))
        if not text.startswith(before) or end <= len(before):
            raise UserError(
                f"messages[{number}]: the chat template does not write the messages before it as the beginning of the "
                "chat, so what the assistant writes is not known: put {% generation %} and {% endgeneration %} around "
                "that in the template, or split the chat so that each example ends with its only answer"
            )
        spans.append((len(before), end))
    return text, spans


def weighted_spans(spans: Sequence[Span], messages: Sequence[Mapping[str, Any]]) -> dict[Span, float]:
    """The spans, one for each message of the assistant, with the `weight` of each message, 1 where it has none; without
    those of weight 0."""
    for number, message in enumerate(messages):
        weight = message.get(WEIGHT)
        is_weight = isinstance(weight, int | float) and 0 <= weight < math.inf
        if weight is not None and not (is_weight and (not weight or message["role"] == ASSISTANT)):
            raise UserError(
                f"messages[{number}].weight is {weight!r}, of role {message['role']!r}; expected of the assistant's a "
                "number, 0 for what is not learned: to weigh sources against each other, use the field weights"
            )
    own = [message.get(WEIGHT) for message in messages if message["role"] == ASSISTANT]
    weights = [1.0 if weight is None else float(weight) for weight in own]
    if set(weights) <= {1.0}:
        return dict.fromkeys(spans, 1.0)
    if len(spans) != len(weights):
        raise UserError(
            f"messages have weights, and of {len(weights)} messages of the assistant the template marks {len(spans)} "
            "parts: put {% generation %} and {% endgeneration %} around each of them in the template"
        )
    return {span: weight for span, weight in zip(spans, weights, strict=True) if weight}


def _shared_length(one: str, other: str) -> int:
    """How many of the first characters the two have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
