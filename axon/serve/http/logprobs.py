"""Log-probabilities in the forms of OpenAI's two endpoints.

Every token that was drawn has them, those of a stop text and the one that ends the text too, which the text has not; so
does OpenAI's own API (https://github.com/stanford-crfm/helm cuts them off), and so does vLLM. In a stream a token comes
with the event that completes its text.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.serve.request import TokenLogprob


class TokenTexts:
    """Which part of a text each of its tokens is: joined they are the text, up to a stop text.

    A character that several tokens spell is that of the last of them, and the others have none of the text, as special
    tokens have none.

    Args:
        prompt: the ids before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self.tokenizer, self.length = tokenizer, 0
        self._opens = not any(map(tokenizer.is_visible, prompt))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def would_be(self, token: int, is_last: bool = False) -> str:
        """The text of a token that might come next; `is_last`: with U+FFFD for a character that is not whole then."""
        state = self._decoder.getstate()
        text = self._decoder.decode(self.tokenizer.bytes_of(token), is_last)
        self._decoder.setstate(state)
        drops = self._opens and text.startswith(" ") and not self.tokenizer.visible([token]).startswith(" ")
        return text[1:] if drops else text  # as some decoders drop the space before a text's first word

    def take(self, token: int, is_last: bool = False) -> str:
        """The same of the token that does."""
        text = self.would_be(token, is_last)
        self._decoder.decode(self.tokenizer.bytes_of(token), is_last)
        self._opens &= not self.tokenizer.is_visible(token)
        self.length += len(text)
        return text

    def take_special(self, name: str) -> str:
        """A special token that the text has by its name."""
        self.length += len(name)
        return name


class Held:
    """What there is to say of tokens, in their order, until as much text as they make has been sent."""

    def __init__(self):
        self._waiting: deque[tuple[int, Any]] = deque()
        self._sent = 0

    def add(self, end: int, said: Any) -> None:
        """`end`: of the token's text, in characters from the beginning of all text."""
        self._waiting.append((end, said))

    def due(self, text: str, ends: bool) -> list[Any]:
        """What may be said with `text`, the next that is sent; `ends`: all, as no more text comes."""
        self._sent += len(text)
        count = sum(1 for end, _ in self._waiting if ends or end <= self._sent)
        return [self._waiting.popleft()[1] for _ in range(count)]


class CompletionLogprobs:
    """Of `/v1/completions`: lists, an element a token. `echoed`: the text of the prompt if the text begins with it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: str | None):
        self._prompt, self._echoed = prompt, echoed
        self._texts, self._held = TokenTexts(tokenizer, () if echoed is not None else prompt), Held()

    def of(
        self, echoed: Sequence[TokenLogprob], new: Sequence[TokenLogprob], text: str, opens: bool, ends: bool
    ) -> dict[str, list]:
        """The next of them: `echoed` are the prompt's but its first, which has no probability. `text`: what is sent
        with them. `opens`, `ends`: whether these are the first, and the last."""
        known: list[TokenLogprob | None] = [*([None] if opens and self._echoed is not None else []), *echoed, *new]
        border = len(known) - len(new) - 1
        for place, one in enumerate(known):
            is_last = place == border or (ends and place == len(known) - 1)
            said = self._said(one, is_last, place <= border)
            self._held.add(self._texts.length, said)
        names, due = ("tokens", "token_logprobs", "top_logprobs", "text_offset"), self._held.due(text, ends)
        return {name: [said[place] for said in due] for place, name in enumerate(names)}

    def _said(self, one: TokenLogprob | None, is_last: bool, in_prompt: bool) -> tuple[Any, ...]:
        """Of the next token its text, log-probability, the likely ones, and where its text begins."""
        start = self._texts.length
        if one is None:
            return self._take(self._prompt[0], is_last, in_prompt), None, None, start
        others = self._others(one, is_last)
        text = self._take(one.token, is_last, in_prompt)
        return text, one.logprob, {**others, text: one.logprob}, start

    def _take(self, token: int, is_last: bool, in_prompt: bool) -> str:
        tokenizer, echoed = self._texts.tokenizer, self._echoed or ""
        name = tokenizer.decode([token]) if in_prompt and not tokenizer.is_visible(token) else ""
        is_named = name != "" and echoed.startswith(name, self._texts.length)
        return self._texts.take_special(name) if is_named else self._texts.take(token, is_last)

    def _others(self, one: TokenLogprob, is_last: bool) -> dict[str, float]:
        """The most likely but the token itself, whose text is no other's: one that reads the same, or is no whole
        character, goes by its id, and a special one by its name."""
        found: dict[str, float] = {}
        for token, logprob in one.top:
            if token != one.token:
                text = self._texts.would_be(token, is_last) or _name(self._texts.tokenizer, token)
                taken = text in found or text == self._texts.would_be(one.token, is_last)
                found[f"token_id:{token}" if taken else text] = logprob
        return found


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Of a token without a text."""
    return f"token_id:{token}" if tokenizer.is_visible(token) else tokenizer.decode([token]) or f"token_id:{token}"


class ChatLogprobs:
    """Of `/v1/chat/completions`: an object a token. What is no whole character has its bytes, and no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._texts, self._held = TokenTexts(tokenizer, prompt), Held()

    def of(self, new: Sequence[TokenLogprob], text: str, ends: bool) -> dict[str, Any]:
        """The next of them; `text`: what is sent with them. `ends`: whether they are the last."""
        for place, one in enumerate(new):
            is_last = ends and place == len(new) - 1
            others = [self._entry(token, value, self._texts.would_be(token, is_last)) for token, value in one.top]
            entry = self._entry(one.token, one.logprob, self._texts.take(one.token, is_last))
            self._held.add(self._texts.length, {**entry, "top_logprobs": others})
        return {"content": self._held.due(text, ends), "refusal": None}

    def _entry(self, token: int, logprob: float, text: str) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(self._texts.tokenizer.bytes_of(token))}
