"""Tool calls in text: how model families write them, and calls read back, whole or as text comes in."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls.

    Args:
        opening, closing: around a call; "" for none. arguments: the field with the arguments, beside `name`.
        listed: whether all calls are one JSON list. bare: whether a text may begin with a call without `opening`, as
            where it is a special token, which texts do not show.
    """

    opening: str
    closing: str
    arguments: str = "arguments"
    listed: bool = False
    bare: bool = False


HERMES = CallForm("<tool_call>", "</tool_call>")
"""Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""
MISTRAL = CallForm("[TOOL_CALLS]", "", listed=True, bare=True)
"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`."""
LLAMA = CallForm("<|python_tag|>", "", "parameters", bare=True)
"""Llama 3, and what is of no other family: `{"name": …, "parameters": {…}}` and no other text."""


@dataclass(frozen=True)
class ToolCall:
    """arguments: an object in JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """text: what is no call."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: "Parsed") -> "Parsed":
        return Parsed(self.text + other.text, self.calls + other.calls)


def form_of(template: str) -> CallForm:
    """The form in which a chat template writes calls."""
    known = (form for form in (HERMES, MISTRAL) if form.opening in template)
    return next(known, LLAMA)


class CallReader:
    """Reads calls as text comes in; what is malformed, or calls no tool of `names`, stays text.

    Space around calls is dropped. How the text is cut into pieces makes no difference to what comes out in all.
    """

    def __init__(self, form: CallForm, names: Collection[str]):
        self._form, self._names = form, frozenset(names)
        self._rest, self._space, self._trims = "", "", False
        self._opened: str | None = None
        """In a call: what opened it, and `_value` is in its JSON."""
        self._value, self._fresh = _Value(), form.bare

    def feed(self, text: str) -> Parsed:
        """What is certain after this piece: new text, and calls that are complete."""
        return self._read(text, last=False)

    def finish(self) -> Parsed:
        """The rest, when nothing more comes."""
        return self._read("", last=True)

    def _read(self, text: str, last: bool) -> Parsed:
        self._rest += text
        found = Parsed()
        while (step := self._inside(last) if self._opened is not None else self._outside(last)) is not None:
            found += step
        return found

    def _outside(self, last: bool) -> Parsed | None:
        """Text up to what opens a call; None if there is no more to say yet."""
        opening, rest = self._form.opening, self._rest
        if self._fresh and (stripped := rest.lstrip()):
            if stripped[0] == self._first and not stripped.startswith(opening):
                if opening.startswith(stripped) and not last:
                    return None
                return self._open(rest[: len(rest) - len(stripped)], "", stripped)
            self._fresh = opening.startswith(stripped) and not last
        elif self._fresh and not last:
            return None
        before, mark, after = rest.partition(opening)
        if mark:
            return self._open(before, mark, after)
        size = 0 if last else _overlap(rest, opening)
        said, self._rest = rest[: len(rest) - size], rest[len(rest) - size :]
        shown = self._say(said)
        if last:
            shown, self._space = shown + self._space, ""
        return Parsed(shown) if shown else None

    @property
    def _first(self) -> str:
        return "[" if self._form.listed else "{"

    def _open(self, before: str, mark: str, after: str) -> Parsed:
        self._opened, self._rest, self._value, self._fresh = mark, after, _Value(), False
        return Parsed(self._say(before))

    def _inside(self, last: bool) -> Parsed | None:
        """The call whose JSON `_rest` begins with; None if it is not whole yet."""
        rest = self._rest.lstrip()
        if rest and rest[0] != self._first:
            return self._malformed()
        end = self._value.end(rest)
        after = rest[end:].lstrip() if end else ""
        closed = end and after.startswith(self._form.closing)
        if not closed and not last and (not end or self._form.closing.startswith(after)):
            return None
        calls = self._calls(rest[:end]) if end and (closed or not after) else ()
        if not calls:
            return self._malformed()
        self._rest = after[len(self._form.closing) :] if closed else ""
        self._opened, self._space, self._trims, self._fresh = None, "", True, self._form.bare
        return Parsed(calls=calls)

    def _malformed(self) -> Parsed:
        """What opened the call is text; all after it is read again as text."""
        mark, self._opened = self._opened or "", None
        if not mark:  # a bare call: its first character is text, lest it be taken for one again
            mark, self._rest = self._rest[:1], self._rest[1:]
        return Parsed(self._say(mark))

    def _say(self, text: str) -> str:
        """`text` after the space before it; its own space waits for what comes, since that of a call is dropped."""
        text = text.lstrip() if self._trims else text
        if not (body := text.rstrip()):
            self._space += text
            return ""
        said, self._space = self._space + body, text[len(body) :]
        self._fresh = self._trims = False
        return said

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return ()
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        return tuple(call for call in calls if call) if all(calls) else ()

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._form.arguments, value.get("arguments"))
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(value["name"], text) if isinstance(arguments, dict) else None


class _Value:
    """Where a JSON object or list ends, in a text that grows."""

    def __init__(self):
        self._seen, self._depth, self._quoted, self._escaped = 0, 0, False, False
        self._end = 0

    def end(self, text: str) -> int:
        """How many characters of `text` are the value; 0: it is not whole yet."""
        while not self._end and self._seen < len(text):
            self._take(text[self._seen])
            self._seen += 1
            if not self._depth:
                self._end = self._seen
        return self._end

    def _take(self, char: str) -> None:
        if self._quoted:
            self._quoted, self._escaped = self._escaped or char != '"', not self._escaped and char == "\\"
        elif char == '"':
            self._quoted = True
        else:
            self._depth += (char in "{[") - (char in "}]")


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
