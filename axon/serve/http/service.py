"""What every route stands on: the model that is served, its worker, its limits, and texts as ids."""

import asyncio
import time
from collections.abc import Sequence

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError, did_you_mean
from axon.serve.http.errors import ApiError
from axon.serve.http.limits import Limits
from axon.serve.http.metrics import Metrics
from axon.serve.http.model import Served
from axon.serve.http.worker import Worker

Given = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""One text or several, or their ids."""


class Service:
    """A server's parts. Raises `UserError` for a model without a tokenizer."""

    def __init__(self, model: Served, limits: Limits = Limits()):
        if model.engine.tokenizer is None:
            raise UserError(f"{model.name} has no tokenizer, and a server answers texts: give the engine one")
        self.model, self.limits, self.created = model, limits, int(time.time())
        self.tokenizer: Tokenizer = model.engine.tokenizer
        self.metrics = Metrics(lambda: self.worker.stats)
        self.worker = Worker(model.engine, limits, self.metrics.generated, model.embedder)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, and of the adapters that are loaded."""
        return (self.model.name, *self.model.engine.adapters)

    def adapter(self, name: str | None, param: str = "model") -> str | None:
        """The adapter that has a model's name; None: the model itself has it. Raises `ApiError` where neither has."""
        if name not in (None, *self.names):
            there = " and ".join(map(repr, self.names[:10]))
            hint = did_you_mean(name, self.names) or f" There is {there}."
            raise ApiError(404, f"No model {name[:200]!r} here.{hint}", param=param, code="model_not_found")
        return None if name == self.model.name else name

    def check_writes(self) -> None:
        """Raise `ApiError` for a model that goes on with no text."""
        if not self.model.writes:
            raise ApiError(400, f"{self.model.name} embeds texts, and writes none: ask /v1/embeddings", param="model")

    async def prompts(self, given: Given) -> list[list[int]]:
        """The ids of one or several prompts. Raises `ApiError` for what the model cannot read."""
        several = listed(given)
        self.worker.check(len(several))
        return [await self.ids(one) for one in several]

    async def texts(self, given: Given, most: int) -> list[list[int]]:
        """The ids of one or several texts to embed, each of at most `most`. Raises `ApiError` likewise."""
        several = listed(given)
        self.worker.check_texts(len(several))
        found = [await self.ids(one, most=most) for one in several]
        if not all(found):
            message = f"input {found.index([])} has no tokens; embed at least one"
            raise ApiError(400, message, param="input", code="invalid_value")
        return found

    async def ids(self, prompt: str | Sequence[int], *, special: bool = True, most: int | None = None) -> list[int]:
        """Of a text, in a thread, with the tokens that open a prompt unless not `special`; or ids, checked. `most`: of
        what is followed by no answer."""
        if isinstance(prompt, str):
            self._check_fits(len(prompt.encode()) // max(1, int(self.tokenizer.byte_lengths.max())), most)
            encode = self.tokenizer.prompt if special else self.tokenizer.encode
            prompt = await asyncio.to_thread(encode, prompt)
        elif beyond := [one for one in prompt if one >= self.tokenizer.vocab]:
            raise ApiError(400, f"The prompt has the id {beyond[0]}; ids are below {self.tokenizer.vocab}")
        self._check_fits(len(prompt), most)
        return list(prompt)

    def _check_fits(self, tokens: int, most: int | None) -> None:
        if most is not None and tokens > most:
            message = f"The text has {tokens:,} tokens or more; it may have {most:,}"
        elif most is None and self.model.engine.room(tokens) < 1:
            longest = self.model.engine.max_length
            message = f"The prompt has {tokens:,} tokens or more; it and its answer may have {longest:,}"
        else:
            return
        raise ApiError(400, message, code="context_length_exceeded")


def listed(given: Given) -> Sequence[str | Sequence[int]]:
    """One or several texts or lists of ids, as several."""
    one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if one else given  # pyright: ignore[reportReturnType]
