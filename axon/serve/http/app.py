"""The ASGI app: its routes, who may call them, and what it says of itself."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from axon.serve.http.access import AccessLog
from axon.serve.http.adapters import load_adapter, unload_adapter
from axon.serve.http.chat import chat_completions
from axon.serve.http.completions import completions
from axon.serve.http.errors import HANDLERS, ApiError
from axon.serve.http.openapi import description
from axon.serve.http.page import read_page
from axon.serve.http.service import Service
from axon.serve.http.texts import detokenize, embeddings, tokenize, tokenizer_info

Handler = Callable[[Service, Request], Awaitable[Response]]


def app(service: Service, log: Callable[[str], None]) -> Starlette:
    """An app that starts the worker and ends it with itself; `log` is given a line for each request."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()

    def route(path: str, handler: Handler, method: str = "POST", *, open: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            if not open:
                _check_key(service, request)
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/", page, "GET", open=True),
        route("/health", health, "GET", open=True),
        route("/openapi.json", openapi, "GET", open=True),
        route("/metrics", metrics, "GET"),
        route("/state", state, "GET"),
        route("/tokenizer_info", tokenizer_info, "GET"),
        route("/tokenize", tokenize),
        route("/detokenize", detokenize),
        route("/v1/models", models, "GET"),
        route("/v1/models/{model:path}", one_model, "GET"),
        route("/v1/completions", completions),
        route("/v1/chat/completions", chat_completions),
        route("/v1/embeddings", embeddings),
        route("/v1/load_lora_adapter", load_adapter),
        route("/v1/unload_lora_adapter", unload_adapter),
    ]
    middleware = [Middleware(AccessLog, log=log, count=service.metrics.answered)]
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=HANDLERS)


def _check_key(service: Service, request: Request) -> None:
    """Raise `ApiError` unless the request shows one of the keys, or there are none."""
    if not (keys := service.limits.keys):
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        message = "No valid key: send the header `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def page(service: Service, request: Request) -> Response:
    found = read_page()
    return Response(found.html, headers=found.headers)


async def health(service: Service, request: Request) -> Response:
    """503 where no request is taken any more."""
    service.worker.check()
    return JSONResponse({"status": "ok"})


async def openapi(service: Service, request: Request) -> Response:
    return JSONResponse(description())


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def state(service: Service, request: Request) -> Response:
    worker = service.worker
    status = "failed" if worker.failed else "draining" if worker.draining else "ok"
    return JSONResponse({"model": service.model.name, "status": status, **service.metrics.state()})


async def models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_about(service, name) for name in service.names]})


async def one_model(service: Service, request: Request) -> Response:
    service.adapter(name := request.path_params["model"])
    return JSONResponse(_about(service, name))


def _about(service: Service, name: str) -> dict[str, Any]:
    """`chat`: whether it takes conversations; `writes` and `embeds`: whether it goes on with texts, and embeds them;
    `parent`: the model that an adapter is of."""
    one = {"id": name, "object": "model", "created": service.created, "owned_by": "axon"}
    model = service.model
    parent = {} if name == model.name else {"parent": model.name}
    embeds = model.embedder is not None and not parent
    can = {"chat": model.chat is not None, "writes": model.writes, "embeds": embeds}
    return {**one, **parent, "max_model_len": model.engine.max_length, **can}
