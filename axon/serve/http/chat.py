"""`POST /v1/chat/completions`: conversations that are answered."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from axon.data.tokenizer import Tokenizer
from axon.errors import suggest
from axon.serve.calls import CallReader, ToolCall
from axon.serve.http.access import Record
from axon.serve.http.body import parse
from axon.serve.http.conversations import Conversations
from axon.serve.http.errors import ApiError
from axon.serve.http.logprobs import ChatLogprobs
from axon.serve.http.reply import Choice, Reply, respond
from axon.serve.http.requests import check_ids, format_grammar, requests_for, token_limit, with_defaults
from axon.serve.http.schema import ChatBody, Message, NamedTool, Rendering
from axon.serve.http.service import Service
from axon.serve.request import Finish, Grammar

Tools = list[dict[str, Any]]


async def chat_completions(service: Service, request: Request) -> Response:
    body = with_defaults(service, await parse(request, ChatBody, service.limits))
    adapter = service.adapter(body.model)
    service.check_writes()
    check_ids(service, body)
    _check(body)
    chat, tools = chat_of(service), _tools(body)
    prompt = await conversation(service, body.messages, tools, body)
    param, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        param, asked = "max_tokens", body.max_tokens
    requests = requests_for(
        body,
        adapter,
        [prompt],
        [token_limit(service, prompt, asked, param)],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await _grammar(service, chat, body, tools),
    )
    reply = ChatReply(body, request.state.record, prompt, service.tokenizer)
    if tools:
        reply.readers = [chat.reader(tools) for _ in range(body.n)]
    return await respond(request, service.worker.open(requests), reply, service.limits.queue_seconds)


def chat_of(service: Service) -> Conversations:
    """Raises `ApiError` for a model that takes no conversations."""
    if service.model.chat is None:
        message = f"{service.model.name} has no chat template: ask /v1/completions to continue a text"
        raise ApiError(400, message, param="messages")
    return service.model.chat


async def conversation(service: Service, messages: Sequence[Message], tools: Tools, form: Rendering) -> list[int]:
    """The ids that an answer follows. Raises `ApiError` for what the model cannot read."""
    chat, given = chat_of(service), [message.model_dump(exclude_none=True) for message in messages]
    opens, continues = form.add_generation_prompt, form.continue_final_message
    if opens and continues:
        message = "add_generation_prompt opens an answer, continue_final_message goes on with the last: set one of them"
        raise ApiError(400, message, param="continue_final_message")
    rendered = partial(
        chat.ids,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        variables=form.chat_template_kwargs or {},
    )
    try:
        ids = await asyncio.to_thread(rendered, given, tools)
    except RecursionError:
        raise ApiError(400, "messages, tools or chat_template_kwargs are nested too deeply") from None
    return await service.ids(ids)


def _check(body: ChatBody) -> None:
    """Raise `ApiError` for fields that contradict each other."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: set that to true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens is another name of max_completion_tokens: give one", param="max_tokens")
    names = [tool.function.name for tool in body.tools or ()]
    if len(names) > len(set(names)):
        raise ApiError(400, f"tools has a name twice, in {', '.join(names)}", param="tools")
    if not names and body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(body.tool_choice, NamedTool) and (name := body.tool_choice.function.name) not in names:
        raise ApiError(400, f"tool_choice: no tool {name[:64]!r}.{suggest(name, names)}", param="tool_choice")


def _tools(body: ChatBody) -> Tools:
    """The tools that may be called."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if isinstance(body.tool_choice, NamedTool):
        return [tool for tool in tools if tool["function"]["name"] == body.tool_choice.function.name]
    return [] if body.tool_choice == "none" else tools


async def _grammar(service: Service, chat: Conversations, body: ChatBody, tools: Tools) -> Grammar | None:
    """What holds an answer to a format, or to the call of a tool, if one is demanded."""
    demanded = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    wanted = await format_grammar(service, body.response_format)
    if demanded and wanted:
        message = "response_format: an answer that has to call a tool has no other format; leave one of them out"
        raise ApiError(400, message, param="response_format")
    return await asyncio.to_thread(chat.grammar, tools, body.parallel_tool_calls is not False) if demanded else wanted


class ChatReply(Reply):
    """`readers` read calls of tools out of the choices; none, where none may be called."""

    body: ChatBody
    readers: Sequence[CallReader] = ()

    def __init__(self, body: ChatBody, record: Record, prompt: Sequence[int], tokenizer: Tokenizer):
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, record, kind, "chatcmpl", body.n, len(prompt))
        self._logprobs = [ChatLogprobs(tokenizer, prompt) for _ in range(body.n)]
        self._opened: set[int] = set()
        self._calls = [0] * body.n
        """Of each choice so far."""

    def whole_choice(self, place: int) -> dict[str, Any]:
        choice = self.choices[place]
        text, calls = self._parsed(place, choice)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs, finish = self._logprobs_of(place, choice), self._finish(place, choice)
        return {"message": message, "logprobs": logprobs, "finish_reason": finish}

    def changes(self, place: int, new: Choice) -> Iterable[dict[str, Any]]:
        if place not in self._opened:
            self._opened.add(place)
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        before = self._calls[place]
        text, calls = self._parsed(place, new)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": k, **_call(call)} for k, call in enumerate(calls, before)]
        logprobs = self._logprobs_of(place, new)
        if delta or (logprobs and logprobs["content"]):
            yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if new.finish:
            yield {"delta": {}, "logprobs": None, "finish_reason": self._finish(place, new)}

    def _parsed(self, place: int, new: Choice) -> tuple[str, Sequence[ToolCall]]:
        """What is certain of a choice after a part of it that is new: text, and calls."""
        if not self.readers:
            return new.text, ()
        reader = self.readers[place]
        parts = [reader.feed(new.text), *([reader.finish()] if new.finish else [])]
        calls = [call for part in parts for call in part.calls]
        self._calls[place] += len(calls)
        return "".join(part.text for part in parts), calls

    def _finish(self, place: int, new: Choice) -> str | None:
        """An answer that was cut is so, though it has calls: a further one may be missing."""
        return "tool_calls" if self._calls[place] and new.finish is Finish.STOP else new.finish

    def _logprobs_of(self, place: int, new: Choice) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return self._logprobs[place].of(new.logprobs, new.text, ends=new.finish is not None)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
