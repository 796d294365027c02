"""A model's chat template, its form of calls and its grammars, as the server wants conversations."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axon.serve.calls import CallReader, form_of
from axon.serve.chat import Chat
from axon.serve.grammar import Grammars, Matcher
from axon.serve.tools import call_grammar, tool_names

Tools = Sequence[Mapping[str, Any]]


class Conversations:
    """A model's own form of conversations, with OpenAI's messages and tools. Raises `UserError` for what it refuses."""

    def __init__(self, chat: Chat, grammars: Grammars):
        self._chat, self._grammars, self._form = chat, grammars, form_of(chat.template(tools=True).source)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """See `axon.serve.chat.Chat.ids`."""
        return self._chat.ids(
            messages,
            tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def reader(self, tools: Tools) -> CallReader:
        """Of an answer that may call these."""
        return CallReader(self._form, tool_names(tools))

    def grammar(self, tools: Tools, many: bool) -> Matcher:
        """Of an answer that calls one of these, or, if `many`, one or several."""
        return call_grammar(self._grammars, self._form, tools, many=many)
