"""Parts of what the assistant writes that count otherwise than the rest of a message: by spans of its content."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from axon.errors import UserError

PARTS = "weights"
"""Key of a message: `[[from, to, weight], …]`, of the characters of its content, `to` not included."""


def weighted_parts(
    text: str, spans: Sequence[tuple[int, int]], written: Sequence[str], messages: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, int], float]:
    """Spans of a chat's text → their weight, of messages with `weights`.

    Args:
        text: of the chat. spans: of the assistant's messages in it. written: the content of each message as it is
            written there. messages: as they were given.

    Raises `UserError` for spans that are none, or of content that the template does not write as it is.
    """
    parts = {number: _parts(message, f"messages[{number}].{PARTS}") for number, message in enumerate(messages)}
    own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(parts.values()):
        return {}
    if len(spans) != len(own):
        raise UserError(
            f"messages have {PARTS}, and of {len(own)} messages of the assistant the template marks {len(spans)}: put "
            "{% generation %} and {% endgeneration %} around each in the template"
        )
    found = {}
    for number, (begin, end) in zip(own, spans, strict=True):
        content = written[number]
        at = text.find(content.strip(), begin, end) - (len(content) - len(content.lstrip()))
        if parts[number] and (not content.strip() or content.strip() not in text[begin:end]):
            raise UserError(
                f"messages[{number}].{PARTS}: the chat template does not write the content as it is, so where parts "
                "are is not known: leave them out, or use another template"
            )
        found |= {(at + first, at + last): weight for first, last, weight in parts[number]}
    return found


def _parts(message: Mapping[str, Any], where: str) -> list[tuple[int, int, float]]:
    """The parts of a message. Raises `UserError` for what is none."""
    if (given := message.get(PARTS)) is None:
        return []
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or not isinstance(given, list):
        raise UserError(
            f"{where} is of role {message.get('role')!r}, or not a list; expected of the assistant's, whose content is "
            "a text, [[from, to, weight], …], of its characters"
        )
    parts, end = [], 0
    for one in given:
        numbers = isinstance(one, list | tuple) and len(one) == 3 and all(isinstance(n, int | float) for n in one)
        if not numbers or not end <= one[0] < one[1] <= len(content) or not 0 <= one[2] < math.inf:
            raise UserError(
                f"{where} has {one!r}; expected [from, to, weight] with {end} ≤ from < to ≤ {len(content)}, the "
                "characters of the content, in order, and a weight of at least 0"
            )
        parts.append((int(one[0]), end := int(one[1]), float(one[2])))
    return parts
