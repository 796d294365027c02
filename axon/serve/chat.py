"""Chats as ids: what a model's own template makes of messages."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from axon.checkpoint.huggingface.hub import TEMPLATE, TEMPLATES_BY_NAME
from axon.checkpoint.huggingface.tokenizer import SETTINGS
from axon.data.tokenizer import Tokenizer
from axon.disk import reading
from axon.errors import UserError, did_you_mean, suggest
from axon.foreign_json import NULL, TEXT, Kind, list_of, read_field, read_json
from axon.serve.chat_turns import WEIGHT, Renderer, Turns, marked_spans, turn_spans, weighted_spans
from axon.serve.left_out import check_written
from axon.serve.special import Hiding, SpecialText
from axon.serve.template import Template
from axon.serve.weighted_parts import PARTS, weighted_parts

Message = Mapping[str, Any]

MAP = "special_tokens_map.json"
USED = ("default", "tool_use")
"""Names of the templates that chats are written by: without tools, and with."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a model without a template: `bos`, a line `role: content` a message, and `assistant:`."""
TEMPLATES = TEXT | list_of(Kind('an object with the texts "name" and "template"', lambda one: _is_named(one))) | NULL
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What a template is given of a message."""
ANSWERED: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "."})
"""A question and an answer, for what a template writes after one."""
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
"""Names that a chat's own variables do not have, besides those of special tokens."""


class Chat:
    """Makes prompts of messages. A template writes special tokens, and messages never do: see `special.py`.

    Args:
        tokenizer: of the model. templates: by name; "default" is one of them, and "tool_use" is for chats with tools.
        variables: what a template may use besides, as `bos_token`.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, Template], variables: Mapping[str, Any]):
        self._templates, self._variables = dict(templates), dict(variables)
        self._tokenizer = tokenizer
        self._written = set[tuple[Any, ...]]()
        self._special = SpecialText(tokenizer, [template.source for template in self._templates.values()])

    @classmethod
    def of(cls, folder: Path | None, tokenizer: Tokenizer) -> "Chat":
        """As the files of a model's folder say: chat_template.jinja, with those of additional_chat_templates by their
        names, else `chat_template` in tokenizer_config.json.

        None, or a model without a template: `PLAIN`. Raises `UserError` for a template that is none.
        """
        settings: dict[str, Any] = {"bos_token": tokenizer.decode([tokenizer.bos])}
        for path in (folder / MAP, folder / SETTINGS) if folder else ():
            settings |= read_json(path) if path.is_file() else {}
        sources = _sources(folder, settings)
        where = str(folder or "the built-in template")
        return cls(tokenizer, {name: Template(text, where) for name, text in sources.items()}, _special(settings))

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The ids of a chat in OpenAI's form: `role`, `content` (a text, or parts of type "text"), `tool_calls`, ….

        `add_generation_prompt`: they open an answer. `continue_final_message`: they end where the content of the last
        message does. `variables`: what the template reads besides, as `enable_thinking`.
        Raises `UserError` for a message that is not of this form, or that the template refuses.
        """
        hidden, render = self._renderer(messages, tools, variables)
        end = secrets.token_hex(16) if continue_final_message else ""  # where the template writes it, the content ends
        hidden[-1]["content"] += end
        text = render(hidden, add_generation_prompt=add_generation_prompt)
        return self._special.encode(_before(text, end) if end else text, render.hiding)

    def turns(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> "Turns":
        """The ids of a whole chat, and what counts of them, which the assistant writes.

        That is what the template marks by `{% generation %}`; else, of each message of the assistant, what is rendered
        after the prompt that opens it, up to the last special token there. The text is encoded once, as it is rendered
        whole: an id is the assistant's if it begins within its text. Such a message counts by its `weight`, 1 where it
        has none; with 0, as in OpenAI's files, it is not learned; and parts of its content by its `weights`, see
        `axon.serve.weighted_parts`. Raises as `ids`, for other weights, for messages or
        tools that the template leaves out, and for a template that marks nothing and does not render a chat's first
        messages as the beginning of the chat.
        """
        plain = [{name: value for name, value in one.items() if name not in (WEIGHT, PARTS)} for one in messages]
        hidden, render = self._renderer(plain, tools, {})
        text, spans = marked_spans(render, hidden) if render.template.marks_turns else turn_spans(render, hidden)
        self._check_written(hidden, render)
        parts = weighted_parts(text, spans, [one["content"] for one in hidden], messages)
        located = self._special.located(text, render.hiding)
        return Turns.of(located, weighted_spans(spans, messages), self._tokenizer, parts)

    def reply(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages that follow an answer, and of the prompt that opens the next one.

        The template writes them after a question and an answer that stand for any: what of an answer's end the model
        does not write is theirs. Raises as `turns`.
        """
        hidden, render = self._renderer([*ANSWERED, *messages], None, {})
        answer = turn_spans(render, hidden)[1][0]
        located = self._special.located(render(hidden, add_generation_prompt=True), render.hiding)
        learned = Turns.of(located, {answer: 1.0}, self._tokenizer).learned
        return [token for token, *_ in located[len(learned) - learned[::-1].index(True) :]]

    def _renderer(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], "Renderer"]:
        """The messages with special tokens hidden, and what renders them."""
        if not messages:
            raise UserError("messages is empty; give at least one")
        template = self.template(bool(tools))
        self._check(template, variables)
        chat = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
        hiding = self._special.hiding([template.source, *_texts([chat, tools, variables, self._variables])])
        shared = {**self._variables, **hiding.hide(variables), "tools": hiding.hide(tools) or None}
        return [_hidden(message, hiding) for message in chat], Renderer(template, hiding, shared)

    def template(self, tools: bool = False) -> Template:
        """The one for chats with or without tools."""
        return self._templates.get(USED[tools], self._templates["default"])

    @property
    def unused(self) -> list[str]:
        """Names of templates that no chat is written by."""
        return sorted(self._templates.keys() - {*USED})

    def _check_written(self, messages: Sequence[dict[str, Any]], render: "Renderer") -> None:
        """Raise `UserError` for what the template leaves out; of chats with the same roles one is looked at."""
        tools = bool(render.shared["tools"])
        roles = (tools, *((one["role"], bool(one["content"].strip()), "tool_calls" in one) for one in messages))
        if roles in self._written:
            return
        check_written(render, messages)
        if tools and render(messages, tools=None) == render(messages):
            raise UserError("the chat template leaves out tools: use one that writes them, or leave them out")
        self._written.add(roles)

    def _check(self, template: Template, variables: Mapping[str, Any]) -> None:
        """Raise `UserError` for the name of a variable that the template does not read, or is not a person's to set."""
        for name in variables:
            if name in RESERVED or name in self._variables or name.endswith("_token"):
                raise UserError(f"chat_template_kwargs has {name!r}, which a chat has already; leave it out")
            if name not in template.variables:
                hint = did_you_mean(name, template.variables - self._variables.keys() - {*RESERVED})
                raise UserError(f"chat_template_kwargs has {name[:80]!r}, which the chat template does not read.{hint}")


def _before(text: str, end: str) -> str:
    """The text up to the last `end`. Raises `UserError` for a template that did not write it."""
    if end not in text:
        raise UserError("continue_final_message: the chat template does not write the content of the last message")
    return text[: text.rindex(end)]


def _sources(folder: Path | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name → the template's text; the file comes before the setting, as in `transformers`."""
    if folder and (folder / TEMPLATE).is_file():
        named = {"default": folder / TEMPLATE} | {path.stem: path for path in sorted(folder.glob(TEMPLATES_BY_NAME))}
        return {name: _read(path) for name, path in named.items()}
    found = read_field(str(folder and folder / SETTINGS), settings, "chat_template", TEMPLATES, None) or PLAIN
    if isinstance(found, str):
        return {"default": found}
    named = {one["name"]: one["template"] for one in found}
    if "default" not in named:
        raise UserError(f"{folder}: chat_template in {SETTINGS} has no template named default.{suggest('', named)}")
    return named


def _read(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8")


def _is_named(template: Any) -> bool:
    return type(template) is dict and all(type(template.get(name)) is str for name in ("name", "template"))


def _special(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of special tokens: `bos_token` and others that the settings name, as texts."""
    found = {name: value for name, value in settings.items() if name.endswith("_token") and value}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """As templates expect it: its content one text, the arguments of its calls an object."""
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise UserError(f'{where} is not a message; expected an object as {{"role": "user", "content": "…"}}')
    if role not in ROLES:
        raise UserError(f"{where}.role is {role!r}; there is no such role.{suggest(role, ROLES)}")
    known = {name: message[name] for name in FIELDS if message.get(name) is not None}
    calls = known.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{where}.tool_calls is not a list of calls")
    if calls:
        known["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return {**known, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    raise UserError(f'{where} has what is no text; expected a text, or parts as {{"type": "text", "text": "…"}}')


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} is not a call; expected function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments  # what a model wrote may be no JSON
    return {**call, "function": {**function, "arguments": parsed}}


def _hidden(message: Mapping[str, Any], hiding: Hiding) -> dict[str, Any]:
    """An assistant's text may have what models write, as `</think>`; nobody's has special tokens."""
    return hiding.hide(message, strict=message["role"] != "assistant")


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _texts([*tree.keys(), *tree.values()])
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _texts(part)
