"""What the server stands in front of: an engine, an embedder, and what turns chats, schemas and texts into requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.adapters import Adapter
from axon.serve.embedder import Embedder
from axon.serve.engine import Engine
from axon.serve.grammar import Grammars
from axon.serve.http.conversations import Conversations
from axon.serve.replicas import Replicas
from axon.serve.request import Request, Update
from axon.serve.stats import Stats


@dataclass(frozen=True)
class NoEngine:
    """In the place of an engine, of a model that writes no text."""

    tokenizer: Tokenizer
    max_length: int
    busy = False
    adapters = ()

    def room(self, prompt: int) -> int:
        return self.max_length - prompt

    def submit(self, request: Request) -> int:
        raise UserError("this model embeds texts, and writes none")

    def step(self) -> Sequence[Update]:
        return ()

    def cancel(self, number: int) -> None:
        """There is none."""

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        raise UserError("this model embeds texts, and adapters are of models that write some")

    def unload_adapter(self, name: str) -> None:
        self.load_adapter(name, Adapter(0, {}))

    def stats(self) -> Stats:
        return Stats()


AnyEngine = Engine | Replicas | NoEngine
"""One thread calls its methods, but for `room` and `adapters`, which any may ask for; its attributes do not change."""


@dataclass(frozen=True)
class Served:
    """A model to serve under a name. None: it has none of it, and requests that need it are refused; `NoEngine`: it
    writes no text. `defaults`: values of requests' fields, as `temperature`, where they have none of their own.
    `read_adapter`: of a location, for clients that load adapters while the model is served; None: they may not."""

    name: str
    engine: AnyEngine
    chat: Conversations | None = None
    grammars: Grammars | None = None
    embedder: Embedder | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_adapter: Callable[[str], Adapter] | None = None

    @property
    def writes(self) -> bool:
        """Whether it goes on with texts."""
        return not isinstance(self.engine, NoEngine)
