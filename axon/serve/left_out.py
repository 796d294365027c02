"""What a chat template leaves out of a chat without a word, as messages of a role that it does not know."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axon.errors import UserError

Message = Mapping[str, Any]
CONTENT, CALLS = "content", "tool_calls"


def check_written(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> None:
    """Raise `UserError` for the first message whose content, or whose calls, the text does not depend on.

    A content that is not written where the message has calls, which are, passes: many templates write either. All are
    marked at once, so that a chat is rendered but once more; what is then not there is left out of the chat by itself.
    """
    marks = [secrets.token_hex(16) for _ in messages]
    marked = _rendered(render, [_marked(*one) for one in zip(messages, marks, strict=True)]) or ""
    for number, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        part = CALLS if message.get(CALLS) else CONTENT
        if not (message.get(CALLS) or message[CONTENT].strip()) or f"{part}{mark}" in marked:
            continue
        empty = {name: value for name, value in message.items() if name != CALLS} | (
            {CONTENT: ""} if part == CONTENT else {}
        )
        if _rendered(render, [*messages[:number], empty, *messages[number + 1 :]]) == render(messages):
            raise UserError(
                f"messages[{number}]: the chat template leaves out the {part} of role {message['role']!r}: use a "
                "template that writes it, or leave the message out"
            )


def _marked(message: Message, mark: str) -> Message:
    """The message with marks in the place of its content, and of the name of its first call."""
    marked = {**message, CONTENT: f"{CONTENT}{mark}"} if message[CONTENT].strip() else {**message}
    if calls := message.get(CALLS):
        function = {**calls[0]["function"], "name": f"{CALLS}{mark}"}
        marked[CALLS] = [{**calls[0], "function": function}, *calls[1:]]
    return marked


def _rendered(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str | None:
    """The text; None where the template refuses such messages, which it then does not leave out."""
    try:
        return render(messages)
    except UserError:
        return None
