"""Messages and tools as files of chats have them, in OpenAI's form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axon.errors import suggest
from axon.serve.chat import ROLES

Message = dict[str, Any]
SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bing", "chatgpt", "function_call"), "assistant"),
    "observation": "tool",
}
"""Who speaks, in OpenAI's form and in ShareGPT's → the role."""
KEYS = {"role": "from", "content": "value"}
"""Key of a message in OpenAI's form → in ShareGPT's."""
TURNS = "messages", "conversations", "prompt", "completion", "chosen", "rejected"
"""Columns that may hold messages, or one."""


class Malformed(Exception):
    """The column, and what is expected in it."""


@dataclass(frozen=True)
class Names:
    """What records call things: `columns`, column, or key of a message, → its name there; `roles`, who speaks there →
    the role."""

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def key(self, name: str, turn: Mapping[str, Any]) -> str:
        """The key of a message that has its role, or its content, if any has."""
        own = self.column(name)
        return own if own in turn else KEYS[name]


def openai_turns(value: Any, column: str, names: Names) -> Any:
    """What a column holds, with each message in it in OpenAI's form; a message alone is a list of one. A value without
    messages is left as it is."""
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list) or not all(isinstance(one, Mapping) for one in turns):
        return value
    return [_openai_turn(one, column, names) for one in turns]


def _openai_turn(turn: Mapping[str, Any], column: str, names: Names) -> Message:
    speaker, content = (turn.get(names.key(name, turn)) for name in KEYS)
    if not isinstance(speaker, str):
        raise Malformed(
            column,
            'messages as [{"role": "user", "content": "…"}] or [{"from": "human", "value": "…"}]; other keys are named '
            "by the field columns, as {'role': 'speaker', 'content': 'text'}",
        )
    role = names.roles.get(speaker) or SPEAKERS.get(speaker)
    if role is None:
        known = suggest(speaker, {*SPEAKERS, *names.roles})
        mapping = f"{{{speaker!r}: 'user'}}"
        raise Malformed(column, f"roles, not {speaker!r}.{known} Others are mapped by the field roles, as {mapping}")
    taken = {names.key(name, turn) for name in KEYS}
    message = {key: value for key, value in turn.items() if key not in taken}
    call = message.pop("function_call", None)
    if speaker == "function_call":
        call, content = read_json(content, column, "calls as JSON"), ""
    if call:
        calls = call if isinstance(call, list) else [call]
        message["tool_calls"] = [{"type": "function", "function": one} for one in calls]
    return {"role": role, "content": content, **message}


def openai_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tools, of which all or each may be JSON; a function alone, as ShareGPT's, is one."""
    expected = "a list of tools, as OpenAI's, or it as JSON"
    tools = read_json(value, "tools", expected) or []
    tools = [read_json(one, "tools", expected) for one in tools] if isinstance(tools, list) else None
    if tools is None or not all(isinstance(one, Mapping) for one in tools):
        raise Malformed("tools", expected)
    return tuple(
        {"type": "function", "function": one} if "name" in one and "function" not in one else one for one in tools
    )


def read_json(value: Any, column: str, expected: str) -> Any:
    """What a text says as JSON; another value is itself."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError):
        raise Malformed(column, expected) from None
