"""`ReplyEncoder`, the tokens by which a prompt continues with what an environment says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.serve.chat import Chat


class ReplyEncoder:
    """What an environment says → its ids, with those that open the next answer.

    Args:
        role: who speaks to the chat template of `companions`, the files of a model; None: texts follow as they are.
    """

    def __init__(self, tokenizer: Tokenizer, role: str | None, companions: Path | None = None):
        self._parts = tokenizer, role, companions
        self._chat = None if role is None else Chat.of(companions, tokenizer)

    def __call__(self, text: str) -> Sequence[int]:
        tokenizer, role, _ = self._parts
        return tokenizer.encode(text) if self._chat is None else self._chat.reply([{"role": role, "content": text}])

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplyEncoder, self._parts  # a compiled template cannot be pickled
