"""Tools that a model may have to call: the grammar of a call, with arguments as the tool's schema says."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from axon.errors import UserError, suggest
from axon.serve.calls import CallForm
from axon.serve.grammar import Grammars, Matcher


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of tools in OpenAI's form, `{"type": "function", "function": {…}}`; raises `UserError` for others."""
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(
                f'tools[{number}] is not a tool; expected {{"type": "function", "function": {{"name": …}}}}'
            )
    return [tool["function"]["name"] for tool in tools]


def call_grammar(
    grammars: Grammars, form: CallForm, tools: Sequence[Mapping[str, Any]], name: str | None = None, many: bool = True
) -> Matcher:
    """Text that is a call of one of `tools`, or of that with this `name`, with arguments as its schema says.

    `many`: there may be several. Raises `UserError` without tools, for an unknown name, or for a schema that cannot be
    enforced.
    """
    names = tool_names(tools)
    if name is not None and name not in names:
        raise UserError(f"There is no tool {name!r}.{suggest(name, names)}")
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise UserError("A call is required, and there are no tools; give at least one")
    for function in chosen:  # alone, so that the message is about it
        try:
            grammars.json_schema(_schema(function))
        except UserError as error:
            raise UserError(f"tool {function['name']!r}, parameters: {error}") from error
    rules = [_rule(number, grammars, form, function) for number, function in enumerate(chosen)]
    calls = " | ".join(f"call_{number}" for number in range(len(chosen)))
    return grammars.lark("\n".join([_start(grammars, form, many), f"call: {calls}", *rules]))


def _start(grammars: Grammars, form: CallForm, many: bool) -> str:
    opening, closing = (grammars.literal(mark) for mark in (form.opening, form.closing))
    if form.listed:
        more = '(", " call)*' if many else ""
        return f'start: {opening} "[" call {more} "]"'
    if not form.closing:
        return "start: call"
    more = r'("\n" one)*' if many else ""
    return rf"start: one {more}" + "\n" + rf'one: {opening} "\n" call "\n" {closing}'


def _rule(number: int, grammars: Grammars, form: CallForm, function: Mapping[str, Any]) -> str:
    before = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": ')
    return f'call_{number}: {before} {grammars.embedded(_schema(function))} "}}"'


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object whether or not `parameters` says so: without a type, as
    where it is a `$ref` or `anyOf`, a schema allows a number too. Raises `UserError` for a type that is no object."""
    schema = function.get("parameters") or {}
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise UserError(f"type is {kind!r}; must be 'object', as the arguments of a call are by name")
    return {**schema, "type": "object"}
