"""Shapes of examples, recognised by their columns: chats, prompts with completions, and preferences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from axon.data.records import Record
from axon.errors import UserError
from axon.tune.column_names import suggested_columns
from axon.tune.turns import TURNS, Malformed, Message, Names, openai_tools, openai_turns


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, and the tools that the assistant may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Reader = Callable[[Record], tuple[Conversation, ...]]
NAMES = Names()


@dataclass(frozen=True)
class Format:
    """A shape of records: the columns that it has, those that it may have, and how an example is read from them."""

    columns: tuple[str, ...]
    optional: tuple[str, ...]
    read: Reader

    def __str__(self):
        return " and ".join(self.columns)


def read_example(
    record: Record, where: str, formats: Sequence[Format], names: Names = NAMES
) -> tuple[Conversation, ...]:
    """The conversations of a record by the first format that fits: as many as an example of its kind has, or
    pairs of the chosen and the rejected one.

    Args:
        where: the record, for messages. names: what the record calls columns, keys of messages, and roles.

    Raises `UserError` for columns that fit no format, or a value of another shape.
    """
    columns = {ours: names.column(ours) for one in formats for ours in (*one.columns, *one.optional)}
    known = {ours: record[column] for ours, column in columns.items() if record.get(column) is not None}
    for one in formats:
        if known.keys() >= {*one.columns}:
            try:
                return one.read(_with_turns(known, names))
            except Malformed as error:
                column, expected = error.args
                raise UserError(
                    f"{where}: column {columns[column]!r} has {record[columns[column]]!r:.80}; expected {expected}"
                ) from None
    expected = "; ".join(map(str, formats))
    mapping = suggested_columns(record, [one.columns for one in formats], names)
    raise UserError(
        f"{where}: the columns are {', '.join(map(repr, record)) or 'none'}; expected one of: {expected}. Say what "
        f"they are called here by the field columns, as {mapping}"
    )


def _with_turns(record: Record, names: Names) -> Record:
    """The record, with each of its messages in OpenAI's form."""
    turns = {column: openai_turns(record[column], column, names) for column in TURNS if column in record}
    ranked = record.get("ranked")
    if isinstance(ranked, list):
        turns["ranked"] = [openai_turns(one, "ranked", names) for one in ranked]
    return {**record, **turns}


def _text(record: Record, column: str) -> str:
    if not isinstance(value := record[column], str):
        raise Malformed(column, "a text")
    return value


def _messages(record: Record, column: str, role: str | None = None) -> tuple[Message, ...]:
    """A column of messages; with a `role` it may be a text, which is that one's message."""
    value = record[column]
    if role is not None and isinstance(value, str):
        return ({"role": role, "content": value},)
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        also = "a text, or " if role else ""
        raise Malformed(column, f'{also}messages as [{{"role": "user", "content": "…"}}]')
    return tuple(value)


def _with_system(record: Record, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after the one in the column `system`, if there is such."""
    system = _text(record, "system") if "system" in record else ""
    return (*([{"role": "system", "content": system}] if system else []), *messages)


def _tools(record: Record) -> tuple[Mapping[str, Any], ...]:
    return openai_tools(record["tools"]) if "tools" in record else ()


def _chat(column: str) -> Reader:
    """A reader of whole chats in a column."""
    return lambda record: (Conversation(_with_system(record, _messages(record, column)), _tools(record)),)


def _completion(record: Record) -> tuple[Conversation, ...]:
    prompt = _with_system(record, _messages(record, "prompt", "user"))
    return (Conversation((*prompt, *_messages(record, "completion", "assistant")), _tools(record)),)


def _alpaca(record: Record) -> tuple[Conversation, ...]:
    more = _text(record, "input") if "input" in record else ""
    question = _text(record, "instruction") + (f"\n\n{more}" if more else "")
    messages = {"role": "user", "content": question}, {"role": "assistant", "content": _text(record, "output")}
    return (Conversation(_with_system(record, messages)),)


def _pair(record: Record) -> tuple[Conversation, ...]:
    """Two answers to a prompt, or to the messages of `conversations`; without either whole chats."""
    record = {"prompt": record["conversations"], **record} if "conversations" in record else record
    prompt = _with_system(record, _messages(record, "prompt", "user")) if "prompt" in record else ()
    role = "assistant" if prompt else None
    chosen, rejected = (_messages(record, side, role) for side in ("chosen", "rejected"))
    if chosen == rejected:
        raise Malformed("rejected", "another answer than the chosen one: leave the record out")
    starts = bool(prompt) and chosen[: len(prompt)] == prompt  # whole chats beside their prompt
    before = () if starts else prompt
    return tuple(Conversation((*before, *side), _tools(record)) for side in (chosen, rejected))


def _labelled(record: Record) -> tuple[Conversation, ...]:
    """A prompt, and the answer to it that the label is of."""
    if not isinstance(record["label"], bool) and record["label"] not in (0, 1):
        raise Malformed("label", "true for a desirable answer, or false")
    prompt = _with_system(record, _messages(record, "prompt", "user"))
    answer = _messages(record, "completion", "assistant")
    return Conversation(prompt, _tools(record)), Conversation(answer)


def _labelled_chat(column: str) -> Reader:
    """A reader of whole chats in a column, of which the label is of the last answer."""

    def read(record: Record) -> tuple[Conversation, ...]:
        messages = _messages(record, column)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise Malformed(column, "a prompt, and last the assistant's answer")
        return _labelled({**record, "prompt": [*messages[:-1]], "completion": [messages[-1]]})

    return read


def _texts(record: Record) -> tuple[Conversation, ...]:
    """A query, a text that belongs to it, and perhaps one that does not, each as one message."""
    columns = [name for name in ("query", "positive", "negative") if name in record]
    return tuple(Conversation(({"role": "user", "content": _text(record, name)},)) for name in columns)


def _labelled_text(record: Record) -> tuple[Conversation, ...]:
    if not isinstance(record["label"], str | int):
        raise Malformed("label", "the name of a class, or its number")
    message = {"role": "user", "content": _text(record, "text"), "label": record["label"]}
    pair = {"text_pair": _text(record, "text_pair")} if "text_pair" in record else {}
    return (Conversation((message | pair,)),)


def _ranked(record: Record) -> tuple[Conversation, ...]:
    """Each pair of a list of answers, the best first."""
    answers = record["ranked"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise Malformed("ranked", "a list of two answers or more, the best first")
    sides = ({"chosen": better, "rejected": worse} for better, worse in combinations(answers, 2))
    try:
        return tuple(one for side in sides for one in _pair(dict(record) | side))
    except Malformed as error:
        raise Malformed("ranked", f"of each of its answers {error.args[1]}") from None


CHATS = (
    Format(("messages",), ("system", "tools"), _chat("messages")),
    Format(("conversations",), ("system", "tools"), _chat("conversations")),
    Format(("prompt", "completion"), ("system", "tools"), _completion),
    Format(("instruction", "output"), ("input", "system"), _alpaca),
)
"""Formats of one conversation: OpenAI's, ShareGPT's, a prompt with its completion, Alpaca's."""

PAIRS = (
    Format(("chosen", "rejected"), ("prompt", "conversations", "system", "tools"), _pair),
    Format(("prompt", "ranked"), ("system", "tools"), _ranked),
)
"""Formats of pairs of conversations, of which the first is preferred."""

LABELLED = (
    Format(("prompt", "completion", "label"), ("system", "tools"), _labelled),
    Format(("messages", "label"), ("system", "tools"), _labelled_chat("messages")),
    Format(("conversations", "label"), ("system", "tools"), _labelled_chat("conversations")),
)
"""Formats of a prompt and an answer, which is desirable or not, as two conversations."""

LABELLED_TEXTS = (Format(("text", "label"), ("text_pair",), _labelled_text),)
"""Formats of a text, or a pair of them, with its class, as the `label` of its message."""

TEXT_PAIRS = (Format(("query", "positive"), ("negative",), _texts),)
"""Formats of a query with its text, and perhaps a text that is not."""
