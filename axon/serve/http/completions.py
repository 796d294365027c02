"""`POST /v1/completions`: texts that are continued."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from axon.data.tokenizer import Tokenizer
from axon.serve.http.access import Record
from axon.serve.http.body import parse
from axon.serve.http.errors import ApiError
from axon.serve.http.logprobs import CompletionLogprobs
from axon.serve.http.reply import Choice, Reply, respond
from axon.serve.http.requests import check_ids, format_grammar, requests_for, token_limit, with_defaults
from axon.serve.http.schema import CompletionBody
from axon.serve.http.service import Service
from axon.serve.request import Finish, Update

TOKENS = 16
"""Generated where a request does not say how many, as OpenAI has it."""


async def completions(service: Service, request: Request) -> Response:
    body = with_defaults(service, await parse(request, CompletionBody, service.limits))
    adapter = service.adapter(body.model)
    service.check_writes()
    check_ids(service, body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: with echo the prompt is scored, else nothing is left", param="max_tokens")
    if body.best_of not in (None, body.n):
        message = f"best_of is {body.best_of}; must be n, which is {body.n}: all texts that are written are given"
        raise ApiError(400, message, param="best_of")
    prompts = await service.prompts(body.prompt)
    requests = requests_for(
        body,
        adapter,
        prompts,
        # To score a prompt alone, a token is drawn and left out.
        [max(1, token_limit(service, prompt, body.max_tokens, "max_tokens", TOKENS)) for prompt in prompts],
        logprobs=body.logprobs,
        prompt_logprobs=body.echo and body.logprobs is not None,
        grammar=await format_grammar(service, body.response_format),
    )
    reply = CompletionReply(body, request.state.record, prompts, service.tokenizer)
    return await respond(request, service.worker.open(requests), reply, service.limits.queue_seconds)


class CompletionReply(Reply):
    """With `echo` a choice begins with its prompt, as it was given or as the text of its ids."""

    body: CompletionBody

    def __init__(self, body: CompletionBody, record: Record, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer):
        count, tokens = len(prompts) * body.n, sum(map(len, prompts))
        super().__init__(body, record, "text_completion", "cmpl", count, tokens)
        self.tokenizer, self._prompts = tokenizer, prompts
        self._opened: set[int] = set()
        self._logprobs = [
            CompletionLogprobs(tokenizer, prompts[place // body.n], self._prompt_text(place) if body.echo else None)
            for place in range(count if body.logprobs is not None else 0)
        ]

    def take(self, place: int, update: Update) -> Choice:
        if self.body.max_tokens == 0:
            finish = update.finish and Finish.LENGTH
            update = update._replace(ids=(), text="", logprobs=(), finish=finish)
        return super().take(place, update)

    def whole_choice(self, place: int) -> dict[str, Any]:
        return self._part(place, self.choices[place], opens=True)

    def changes(self, place: int, new: Choice) -> Iterable[dict[str, Any]]:
        yield self._part(place, new, opens=place not in self._opened)
        self._opened.add(place)

    def _part(self, place: int, new: Choice, opens: bool) -> dict[str, Any]:
        echoes = opens and self.body.echo
        text = (self._prompt_text(place) if echoes else "") + new.text
        logprobs = None
        if self.body.logprobs is not None:
            echoed = new.prompt_logprobs if self.body.echo else ()
            logprobs = self._logprobs[place].of(echoed, new.logprobs, text, opens, ends=new.finish is not None)
        return {"text": text, "logprobs": logprobs, "finish_reason": new.finish}

    def _prompt_text(self, place: int) -> str:
        number = place // self.body.n
        given = self.body.prompt
        one = given if isinstance(given, str) else given[number]
        return one if isinstance(one, str) else self.tokenizer.decode(self._prompts[number])
