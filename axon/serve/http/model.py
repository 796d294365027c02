"""What the server stands in front of: an engine, an embedder, and what turns chats, schemas and texts into requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.request import Grammar, Request, Update
from axon.serve.stats import Stats


class Engine(Protocol):
    """See `axon.serve.engine.Engine`. One thread calls its methods; its attributes do not change."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_length(self) -> int:
        """Positions of prompt and text, at most."""
        ...

    def room(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many, whichever thread asks; below 1, none."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting."""
        ...

    def submit(self, request: Request) -> int:
        """The request's number. Raises `UserError` for what it cannot serve."""
        ...

    def step(self) -> Sequence[Update]: ...
    def cancel(self, number: int) -> None: ...
    def stats(self) -> Stats: ...


class ToolCall(Protocol):
    """A function that the model wants called: its arguments as JSON text."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


class Parsed(Protocol):
    """Part of an answer: text, and the calls of tools after it."""

    @property
    def text(self) -> str: ...
    @property
    def calls(self) -> Sequence[ToolCall]: ...


class Reader(Protocol):
    """Reads calls out of an answer as it comes; how it is cut into pieces makes no difference."""

    def feed(self, text: str) -> Parsed:
        """What is certain after this piece."""
        ...

    def finish(self) -> Parsed:
        """The rest."""
        ...


class Chat(Protocol):
    """A model's own form of conversations, with OpenAI's messages and tools. Raises `UserError` for what it refuses."""

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Sequence[int]:
        """See `axon.serve.chat.Chat.ids`."""
        ...

    def reader(self, tools: Sequence[Mapping[str, Any]]) -> Reader:
        """Of an answer that may call these."""
        ...

    def grammar(self, tools: Sequence[Mapping[str, Any]], many: bool) -> Grammar:
        """Of an answer that calls one of these, or, if `many`, one or several."""
        ...


class Grammars(Protocol):
    """What an answer can be held to. Raises `UserError` for what cannot be."""

    def json_object(self) -> Grammar:
        """Any JSON object."""
        ...

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar: ...
    def regex(self, pattern: str) -> Grammar: ...
    def lark(self, text: str) -> Grammar: ...


class Pooling(Protocol):
    """What may be asked of embeddings."""

    def check_cut(self, width: int, dimensions: int | None) -> None:
        """Raise `UserError` for embeddings of `width` numbers that may not be cut to so many."""
        ...

    def cut(self, embedding: np.ndarray, dimensions: int | None) -> np.ndarray:
        """The first numbers; None: all."""
        ...


class Embedder(Protocol):
    """See `axon.serve.embedder.Embedder`. The engine's thread calls its methods; its attributes do not change."""

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of a text, at most."""
        ...

    @property
    def pooling(self) -> Pooling: ...

    @property
    def busy(self) -> bool:
        """Whether a text waits."""
        ...

    def submit(self, texts: Sequence[Sequence[int]]) -> int:
        """The number of these texts' ids. Raises `UserError` for what it cannot embed."""
        ...

    def step(self) -> Mapping[int, Sequence[np.ndarray]]:
        """Embed some; number → the embeddings of what is complete."""
        ...

    def cancel(self, number: int) -> None: ...


@dataclass(frozen=True)
class NoEngine:
    """In the place of an `Engine`, of a model that writes no text."""

    tokenizer: Tokenizer
    max_length: int
    busy = False

    def room(self, prompt: int) -> int:
        return self.max_length - prompt

    def submit(self, request: Request) -> int:
        raise UserError("this model embeds texts, and writes none")

    def step(self) -> Sequence[Update]:
        return ()

    def cancel(self, number: int) -> None:
        """There is none."""

    def stats(self) -> Stats:
        return Stats()


@dataclass(frozen=True)
class Served:
    """A model to serve under a name. None: it has none of it, and requests that need it are refused; `NoEngine`: it
    writes no text. `defaults`: values of requests' fields, as `temperature`, where they have none of their own."""

    name: str
    engine: Engine
    chat: Chat | None = None
    grammars: Grammars | None = None
    embedder: Embedder | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether it goes on with texts."""
        return not isinstance(self.engine, NoEngine)
