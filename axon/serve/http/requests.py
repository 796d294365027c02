"""The engine's requests for what a body asks."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from axon.serve.http.errors import ApiError
from axon.serve.http.schema import Format, Generation, GrammarFormat, RegexFormat, SchemaFormat, TextFormat
from axon.serve.http.service import Service
from axon.serve.request import Grammar, Request, Sampling

SEEDS = 2**64
B = TypeVar("B", bound=Generation)


def requests_for(
    body: Generation,
    adapter: str | None,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    *,
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    grammar: Grammar | None = None,
) -> list[Request]:
    """`n` for each prompt, which is to be continued by at most so many `tokens`; each has noise of its own, by the seed
    and by its place among all choices. Raises `ApiError` where more are asked for at least than at most."""
    if body.min_tokens > min(tokens):
        message = f"min_tokens is {body.min_tokens:,}; at most {min(tokens):,} tokens are generated here"
        raise ApiError(400, message, param="min_tokens")
    sampling = _sampling(body, secrets.randbits(64) if body.seed is None else body.seed % SEEDS, logprobs)
    return [
        Request(
            tuple(prompt),
            replace(sampling, tokens=most, min_tokens=body.min_tokens).of_choice(place * body.n + choice),
            priority=-body.priority,  # the lower comes first over HTTP, as in vLLM; of the engine's, the higher
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            adapter=adapter,
        )
        for place, (prompt, most) in enumerate(zip(prompts, tokens, strict=True))
        for choice in range(body.n)
    ]


def with_defaults(service: Service, body: B) -> B:
    """The body with the model's own values in the fields that it does not have."""
    absent = service.model.defaults.keys() - body.model_fields_set
    return body.model_copy(update={name: service.model.defaults[name] for name in absent})


def _sampling(body: Generation, seed: int, logprobs: int | None) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k if (body.top_k or 0) > 0 else None,
        top_p=None if body.top_p == 1 else body.top_p,
        min_p=body.min_p or None,
        seed=seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
        stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def token_limit(
    service: Service, prompt: Sequence[int], asked: int | None, param: str, default: int | None = None
) -> int:
    """How many tokens may follow a prompt: those asked for, else by `default`, else what fits.

    Raises `ApiError` where more than the limit are asked for.
    """
    room = service.model.engine.room(len(prompt))
    most = room if service.limits.tokens is None else service.limits.tokens
    if asked is not None and service.limits.tokens is not None and asked > most:
        raise ApiError(400, f"{param} is {asked:,}; at most {most:,} are generated here", param=param)
    return min(room, most, room if default is None else default) if asked is None else min(asked, room)


def check_ids(service: Service, body: Generation) -> None:
    """Raise `ApiError` for the bias of an id that there is not, or an end at one."""
    vocab = service.tokenizer.vocab
    for param, ids in {"logit_bias": body.logit_bias, "stop_token_ids": body.stop_token_ids}.items():
        if wrong := [token for token in ids or () if int(token) >= vocab]:
            raise ApiError(400, f"{param} has the id {wrong[0]}; ids are below {vocab}", param=param)


async def format_grammar(service: Service, wanted: Format | None) -> Grammar | None:
    """What holds an answer to a format, built in a thread. Raises `ApiError` or `UserError` for what cannot be."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    grammars = service.model.grammars
    if grammars is None:
        message = f"{service.model.name} is served without grammars: leave response_format out"
        raise ApiError(400, message, param="response_format")
    build: Callable[[], Grammar] = grammars.json_object
    if isinstance(wanted, SchemaFormat):
        build = lambda: grammars.json_schema(wanted.json_schema.schema_)  # noqa: E731
    elif isinstance(wanted, RegexFormat):
        build = lambda: grammars.regex(wanted.regex)  # noqa: E731
    elif isinstance(wanted, GrammarFormat):
        build = lambda: grammars.lark(wanted.grammar)  # noqa: E731
    return await asyncio.to_thread(build)
