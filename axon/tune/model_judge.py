"""`ModelJudge`, a reward that a language model gives, asked by OpenAI's interface."""

import asyncio
import os
import re
from dataclasses import dataclass
from functools import cached_property
from ssl import SSLContext
from typing import Any

import httpx2

from axon.checks import check_range
from axon.errors import Unavailable, UserError
from axon.tune.rewards import Sampled

ASKED = """Here is a question, and an answer to it.

Question:
{prompt}

Answer:
{answer}

How good is the answer, from 0 (useless) to 10 (perfect)? Reply with the number alone."""

BUSY = (408, 409, 425, 429)
"""HTTP's codes of a server that could answer later; those from 500 on say this too."""


@dataclass(frozen=True)
class ModelJudge:
    """How good a language model finds an answer (LLM as a judge, Zheng et al., arXiv:2306.05685): the last number of
    its reply, ÷ `best`. It is asked by `POST URL/chat/completions` with temperature 0, of several answers at once.

    A reply without a number costs the answer, as any reward that fails. A server that cannot be reached, or is too
    busy, is asked `attempts` times within `Rollouts.limit`, then the run saves its step and ends; one that refuses the
    question ends it at once.

    Args:
        url: as 'http://localhost:8000/v1', of any server of OpenAI's interface. model: its name there.
        asked: the message; {prompt}, {answer} and {reference}, the right answer, stand for the texts. best: the number
            that counts 1. tokens: of a reply, at most.
        key: name of the environment's variable that has the server's key; empty for none.
        attempts: of a question. pause: seconds before the second, twice as many before each further one.
    """

    url: str = ""
    model: str = ""
    asked: str = ASKED
    best: float = 10.0
    tokens: int = 16
    key: str = ""
    attempts: int = 5
    pause: float = 0.5

    def __post_init__(self):
        check_range(self, "(0, inf)", "best")
        check_range(self, "[1, 2**20]", "tokens")
        check_range(self, "[1, 100]", "attempts")
        check_range(self, "[0, 3600]", "pause")
        if not self.url.startswith(("http://", "https://")) or not self.model:
            raise UserError(
                f"ModelJudge.url is {self.url!r} and ModelJudge.model {self.model!r}; expected a server of OpenAI's "
                "interface and a name that it has, as 'http://localhost:8000/v1' and 'judge'"
            )
        if "{answer}" not in self.asked:
            raise UserError("ModelJudge.asked has no {answer}: it must show the answer that is judged")

    def check(self) -> None:
        if self.key and self.key not in os.environ:
            raise UserError(
                f"ModelJudge.key is {self.key!r}, which the environment lacks: set it, or leave the field out"
            )

    async def __call__(self, sampled: Sampled) -> float:
        reply = await self._replied(self._question(sampled))
        numbers = re.findall(r"-?\d+(?:\.\d+)?", reply)
        if not numbers:
            raise ValueError(f"the judge replies {reply!r:.80}, which has no number")
        return float(numbers[-1]) / self.best

    def _question(self, sampled: Sampled) -> dict[str, Any]:
        """The body of the request."""
        text = re.sub(r"\{(prompt|answer|reference)\}", lambda field: vars(sampled)[field[1]], self.asked)
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.tokens}

    async def _replied(self, question: dict[str, Any]) -> str:
        """The reply's text. Raises `Unavailable` where there is none, also when it is cancelled after an attempt."""
        failed = ""
        try:
            async with httpx2.AsyncClient(timeout=None, verify=self._tls, headers=self._headers()) as client:
                for attempt in range(self.attempts):
                    await asyncio.sleep(self.pause * 2 ** (attempt - 1) if attempt else 0)
                    try:
                        response = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=question)
                    except httpx2.TransportError as error:
                        failed = str(error) or type(error).__name__
                        continue
                    if response.status_code < 500 and response.status_code not in BUSY:
                        return self._text(response)
                    failed = f"{response.status_code} {response.text:.200}"
        except asyncio.CancelledError:
            if not failed:
                raise
        raise Unavailable(f"{self.url} does not answer: {failed}")

    @cached_property
    def _tls(self) -> SSLContext:
        """Reading the certificates takes longer than a question to a server nearby."""
        return httpx2.create_ssl_context()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {os.environ[self.key]}"} if self.key else {}

    def _text(self, response: httpx2.Response) -> str:
        if response.is_error:
            raise Unavailable(f"{self.url} refuses the question: {response.status_code} {response.text:.200}")
        try:
            return str(response.json()["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError):
            raise Unavailable(f"{self.url} does not speak OpenAI's interface: it says {response.text!r:.200}") from None
