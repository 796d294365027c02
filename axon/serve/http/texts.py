"""Endpoints that generate nothing: embeddings, and texts as ids and back."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from axon.errors import UserError
from axon.serve.http.body import parse
from axon.serve.http.chat import conversation
from axon.serve.http.errors import ApiError, overloaded, unavailable
from axon.serve.http.reply import while_connected
from axon.serve.http.schema import DetokenizeBody, EmbeddingBody, TokenizeBody
from axon.serve.http.service import Service


async def embeddings(service: Service, request: Request) -> Response:
    body = await parse(request, EmbeddingBody, service.limits)
    if (adapter := service.adapter(body.model)) is not None:
        message = f"{adapter[:200]} is an adapter, with which no text is embedded: ask {service.model.name}"
        raise ApiError(400, message, param="model")
    embedder = service.model.embedder
    if embedder is None:
        message = f"{service.model.name} is served without embeddings: start the server with --embeddings"
        raise ApiError(400, message, param="model")
    try:
        embedder.pooling.check_cut(embedder.width, body.dimensions)
    except UserError as error:
        raise ApiError(400, str(error), param="dimensions", code="invalid_value") from None
    texts = await service.texts(body.input, embedder.max_length)
    used = request.state.record.prompt_tokens = sum(map(len, texts))
    found = await while_connected(request, _embedded(service, texts))
    cut = [np.asarray(embedder.pooling.cut(one, body.dimensions), "<f4") for one in found]
    data = [
        {"object": "embedding", "index": k, "embedding": _encoded(one, body.encoding_format)}
        for k, one in enumerate(cut)
    ]
    usage = {"prompt_tokens": used, "total_tokens": used}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


async def _embedded(service: Service, texts: Sequence[Sequence[int]]) -> Sequence[np.ndarray]:
    """Raises `ApiError` if they do not come in time, or are not numbers."""
    seconds = service.limits.queue_seconds
    try:
        async with asyncio.timeout(seconds):
            found = await service.worker.embed(texts)
    except TimeoutError:
        raise overloaded(f"The texts were not embedded within {seconds:g} seconds: the server is busy") from None
    if not all(np.isfinite(one).all() for one in found):
        raise unavailable("The model's outputs are not numbers here")
    return found


def _encoded(vector: np.ndarray, form: str) -> Any:
    return vector.tolist() if form == "float" else base64.b64encode(vector.tobytes()).decode()


async def tokenize(service: Service, request: Request) -> Response:
    body = await parse(request, TokenizeBody, service.limits)
    service.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = await conversation(service, body.messages, [], body)
    else:
        ids = await service.ids(body.prompt or "", special=body.add_special_tokens)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.model.engine.max_length})


async def detokenize(service: Service, request: Request) -> Response:
    body = await parse(request, DetokenizeBody, service.limits)
    service.adapter(body.model)
    ids = await service.ids(body.tokens)
    return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, ids)})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """The facts that lm-eval asks for, so as to need no tokenizer of its own."""
    tokenizer = service.tokenizer
    ends = sorted(tokenizer.ends)
    names = {"bos_token": tokenizer.decode([tokenizer.bos]), "eos_token": tokenizer.decode(ends[:1])}
    return JSONResponse(names)
