"""Log-probabilities in the forms of OpenAI's two endpoints."""

import codecs
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


class CompletionLogprobs:
    """Of `/v1/completions`: lists, an element a token. `echoed`: the text of the prompt if the text begins with it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: str | None):
        self._prompt, self._echoed = prompt, echoed
        self._texts = TokenTexts(tokenizer, () if echoed is not None else prompt)

    def of(self, echoed: Sequence[TokenLogprob], new: Sequence[TokenLogprob], opens: bool, ends: bool) -> dict:
        """The next of them: `echoed` are the prompt's but its first, which has no probability. `opens`, `ends`: whether
        these are the first, and the last."""
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        known: list[TokenLogprob | None] = [*([None] if opens and self._echoed is not None else []), *echoed, *new]
        border = len(known) - len(new) - 1
        for place, one in enumerate(known):
            is_last = place == border or (ends and place == len(known) - 1)
            token = self._prompt[0] if one is None else one.token
            found["text_offset"].append(self._texts.length)
            found["top_logprobs"].append(None if one is None else self._others(one, is_last))
            found["tokens"].append(self._take(token, is_last, place <= border))
            found["token_logprobs"].append(None if one is None else one.logprob)
            if one is not None:
                found["top_logprobs"][-1][found["tokens"][-1]] = one.logprob
        return found

    def _take(self, token: int, is_last: bool, in_prompt: bool) -> str:
        tokenizer, echoed = self._texts.tokenizer, self._echoed or ""
        name = tokenizer.decode([token]) if in_prompt and not tokenizer.is_visible(token) else ""
        is_named = name != "" and echoed.startswith(name, self._texts.length)
        return self._texts.take_special(name) if is_named else self._texts.take(token, is_last)

    def _others(self, one: TokenLogprob, is_last: bool) -> dict[str, float]:
        """The likeliest but the token itself, whose text is no other's: one that reads the same, or is no whole
        character, goes by its id, and a special one by its name."""
        found: dict[str, float] = {}
        for token, logprob in one.likeliest:
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
        self._texts = TokenTexts(tokenizer, prompt)

    def of(self, new: Sequence[TokenLogprob], ends: bool) -> dict[str, Any]:
        """The next of them; `ends`: whether they are the last."""
        content = []
        for place, one in enumerate(new):
            is_last = ends and place == len(new) - 1
            others = [self._entry(token, value, self._texts.would_be(token, is_last)) for token, value in one.likeliest]
            text = self._texts.take(one.token, is_last)
            content.append({**self._entry(one.token, one.logprob, text), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float, text: str) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(self._texts.tokenizer.bytes_of(token))}
