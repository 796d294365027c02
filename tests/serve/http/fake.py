"""An engine of no model: what it writes follows from the prompt, the place and the seed alone."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from axon.data.tokenizer import Bpe, Tokenizer
from axon.errors import UserError
from axon.serve.adapters import Adapter
from axon.serve.http.model import Served
from axon.serve.pooling import Pooling
from axon.serve.request import Finish, Request, TokenLogprob, Update
from axon.serve.stats import Stats

WORDS = "the quick brown fox jumps over a lazy dog; größer 漢字 naïve 😀 cliché\n"


@cache
def tokenizer() -> Tokenizer:
    return Bpe(vocab=300).train(iter([WORDS * 20]), report=lambda _: None)


@dataclass(frozen=True)
class FakeGrammar:
    """Of one text."""

    text: str

    def allowed(self) -> np.ndarray:
        raise NotImplementedError

    def accept(self, ids: Sequence[int]) -> int:
        raise NotImplementedError

    def copy(self) -> "FakeGrammar":
        return self

    @property
    def ended(self) -> bool:
        return False


@dataclass
class FakeEngine:
    """`seconds`: of a step. `running`: requests at once. A prompt with BREAK breaks it, one with FAIL fails alone."""

    seconds: float = 0.0
    running: int = 64
    max_length: int = 256
    tokenizer: Tokenizer = field(default_factory=tokenizer)
    cancelled: list[int] = field(default_factory=list)
    loaded: dict[str, Adapter] = field(default_factory=dict)
    asked: list[str | None] = field(default_factory=list)

    def __post_init__(self):
        self.requests: dict[int, tuple[Request, list[int]]] = {}
        self.submitted = self.steps = self.generated = self.prompts = 0

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def room(self, prompt: int) -> int:
        return self.max_length - prompt

    def submit(self, request: Request) -> int:
        if self.room(len(request.prompt)) < 1:
            raise UserError(f"the prompt has {len(request.prompt)} tokens, of {self.max_length}")
        self.asked.append(request.adapter)
        self.submitted += 1
        self.prompts += len(request.prompt)
        self.requests[self.submitted] = request, []
        return self.submitted

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        if adapter.rank > 8:
            raise UserError("no room: raise --adapter-rank")
        self.loaded[name] = adapter

    def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    def cancel(self, number: int) -> None:
        if self.requests.pop(number, None):
            self.cancelled.append(number)

    def stats(self) -> Stats:
        running = min(self.running, len(self.requests))
        return Stats(
            running=running,
            waiting=len(self.requests) - running,
            pages=64,
            free_pages=60,
            prefix_hits=3,
            prefix_queries=9,
            prompt_tokens=self.prompts,
            generated_tokens=self.generated,
            steps=self.steps,
            compiles=2,
        )

    def step(self) -> list[Update]:
        time.sleep(self.seconds)
        self.steps += 1
        updates = [self._advance(number) for number in list(self.requests)[: self.running]]
        for update in updates:
            self.generated += len(update.ids)
            if update.finish:
                del self.requests[update.request]
        return updates

    def _advance(self, number: int) -> Update:
        request, ids = self.requests[number]
        prompt = self.tokenizer.decode(request.prompt)
        if "BREAK" in prompt:
            raise RuntimeError("the device is gone")
        if "FAIL" in prompt:
            return Update(number, finish=Finish.FAILED, error="its logits are NaN")
        token, new = self.draw(request, len(ids)), not ids
        ids.append(token)
        finish, window = self.finish(request, ids), slice(max(0, len(ids) - 40), None)  # a stop text is shorter
        before, text = self.text(request, ids[window][:-1]), self.text(request, ids[window])
        return Update(
            number,
            (token,),
            text[len(before) :],
            () if request.sampling.logprobs is None else (self.logprob(token, request.sampling.logprobs),),
            tuple(self.logprob(t, 1) for t in request.prompt[1:]) if new and request.prompt_logprobs else (),
            finish,
            cached=min(2, len(request.prompt) - 1),
        )

    def draw(self, request: Request, place: int) -> int:
        """The next id: a grammar's text, or a word's pieces as they come."""
        if request.grammar:
            forced = [*self.tokenizer.encode(request.grammar.text), self.tokenizer.bos]
            return forced[place]
        key = request.sampling.seed if request.sampling.temperature else 0
        digest = hashlib.sha256(repr((request.prompt, key, place // 8)).encode()).digest()
        pieces = self.tokenizer.encode(WORDS)
        if place < request.sampling.min_tokens:
            pieces = [one for one in pieces if one not in self.ends(request)]
        return pieces[(digest[0] + place % 8) % len(pieces)]

    def ends(self, request: Request) -> set[int]:
        own = set() if request.sampling.ignore_eos else self.tokenizer.ends
        return {*own, *request.sampling.stop_ids}

    def text(self, request: Request, ids: Sequence[int]) -> str:
        """Whole characters, up to a text that ends it, and no part of one."""
        text = self.tokenizer.visible([one for one in ids if one not in self.ends(request)]).rstrip("\ufffd")
        for stop in request.sampling.stop:
            text = text.split(stop)[0]
        return text

    def finish(self, request: Request, ids: Sequence[int]) -> Finish | None:
        text = self.tokenizer.decode(ids[-40:])
        if ids[-1] in self.ends(request) or any(stop in text for stop in request.sampling.stop):
            return Finish.STOP
        full = len(request.prompt) + len(ids) >= self.max_length
        return Finish.LENGTH if full or len(ids) == request.sampling.tokens else None

    def logprob(self, token: int, count: int) -> TokenLogprob:
        likeliest = [(token, -0.25), *((k, -2.0 - k) for k in range(40, 39 + count))]
        return TokenLogprob(token, -0.25, tuple(likeliest[:count]))


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class FakeReader:
    """A call is written `call NAME ARGUMENTS`, on a line of its own."""

    def __init__(self):
        self.rest = ""

    def feed(self, text: str) -> Parsed:
        *lines, self.rest = (self.rest + text).split("\n")
        found = [ToolCall(*line.split(" ", 2)[1:]) for line in lines if line.startswith("call ")]
        return Parsed("".join(f"{line}\n" for line in lines if not line.startswith("call ")), tuple(found))

    def finish(self) -> Parsed:
        return Parsed(self.rest)


class FakeChat:
    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Sequence[int]:
        if messages[0]["role"] == "tool":
            raise UserError("the template wants a user's message first")
        text = "".join(f"{message['role']}: {said(message)}\n" for message in messages)
        return tokenizer().prompt("".join(tool["function"]["name"] for tool in tools) + text)

    def reader(self, tools: Sequence[Mapping[str, Any]]) -> FakeReader:
        return FakeReader()

    def grammar(self, tools: Sequence[Mapping[str, Any]], many: bool) -> FakeGrammar:
        names = [tool["function"]["name"] for tool in tools][: None if many else 1]
        return FakeGrammar("I ask:\n" + "".join(f'call {name} {{"k": "ö"}}\n' for name in names))


def said(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class FakeGrammars:
    """Writes an object of the schema's property names."""

    def json_object(self) -> FakeGrammar:
        return FakeGrammar("{}")

    def json_schema(self, schema: Mapping[str, Any]) -> FakeGrammar:
        if schema.get("type") == "never":
            raise UserError("nothing meets the JSON schema")
        return FakeGrammar(json.dumps({name: name for name in schema.get("properties", {})}))

    def regex(self, pattern: str) -> FakeGrammar:
        return FakeGrammar(pattern)

    def lark(self, text: str) -> FakeGrammar:
        return FakeGrammar(text)


@dataclass
class FakeEmbedder:
    """Of a text: how many tokens it has, and its last one. Texts of 99 tokens break it, of 98 are no numbers."""

    seconds: float = 0.0
    width = 2
    max_length = 100
    pooling = Pooling("last", normalise=False, cuts=(1,))
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.waiting: dict[int, Sequence[Sequence[int]]] = {}
        self.submitted = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, texts: Sequence[Sequence[int]]) -> int:
        self.submitted += 1
        self.waiting[self.submitted] = texts
        return self.submitted

    def step(self) -> dict[int, list[np.ndarray]]:
        time.sleep(self.seconds)
        number, texts = next(iter(self.waiting.items()))
        del self.waiting[number]
        if any(len(ids) == 99 for ids in texts):
            raise RuntimeError("no memory is left")
        return {number: [np.float32([np.nan if len(ids) == 98 else len(ids), ids[-1]]) for ids in texts]}

    def cancel(self, number: int) -> None:
        if self.waiting.pop(number, None):
            self.cancelled.append(number)


def served(engine: FakeEngine | None = None, **given: Any) -> Served:
    whole = {"chat": FakeChat(), "grammars": FakeGrammars(), "embedder": FakeEmbedder()}
    return Served("tiny", engine or FakeEngine(), **(whole | given))
