"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go, as in vLLM."""

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from axon.serve.adapters import Adapter
from axon.serve.http.body import parse
from axon.serve.http.errors import ApiError
from axon.serve.http.schema import LoadAdapterBody, UnloadAdapterBody
from axon.serve.http.service import Service


async def load_adapter(service: Service, request: Request) -> Response:
    body = await parse(request, LoadAdapterBody, service.limits)
    read, name = _reader(service), body.lora_name
    if name == service.model.name:
        raise ApiError(400, f"{name!r} is the model itself: give the adapter another name", param="lora_name")
    if name in service.names and not body.load_inplace:
        message = f"An adapter {name!r} is loaded: unload it first, or set load_inplace to take its place"
        raise ApiError(400, message, param="lora_name")
    adapter = await asyncio.to_thread(read, body.lora_path)
    await service.worker.call(partial(service.model.engine.load_adapter, name, adapter))
    return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    body = await parse(request, UnloadAdapterBody, service.limits)
    _reader(service)
    if service.adapter(body.lora_name, "lora_name") is None:
        raise ApiError(400, f"{body.lora_name!r} is the model itself, and no adapter", param="lora_name")
    await service.worker.call(partial(service.model.engine.unload_adapter, body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _reader(service: Service) -> Callable[[str], Adapter]:
    """What reads adapters for clients. Raises `ApiError` where they may load and unload none."""
    if service.model.read_adapter is None:
        raise ApiError(403, "No adapters are loaded or unloaded here: start the server with --load-adapters")
    return service.model.read_adapter
