"""A request's body: read within the limits, as JSON, and checked whole."""

import asyncio
import json
import math
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from axon.errors import did_you_mean
from axon.serve.http.errors import ApiError
from axon.serve.http.limits import Limits

B = TypeVar("B", bound=BaseModel)
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
DISCARDED = 16
"""Times the limit: so much of a larger body is read and forgotten, for a client reads no answer before it has sent."""


async def parse(request: Request, kind: type[B], limits: Limits) -> B:
    """The body as a `kind`. Raises `ApiError`."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, f"Content-Type is {media[:80]!r}; must be application/json")
    return validated(decoded(await _read(request, limits)), kind)


async def _read(request: Request, limits: Limits) -> bytes:
    body, size = bytearray(), 0
    close = {"Connection": "close"}  # what else the client may send is not read
    most = limits.body_bytes
    too_large = ApiError(413, f"The body has more than {most:,} bytes, the most that is read", headers=close)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > DISCARDED * most):
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > DISCARDED * most:
                    break
                if size <= most:
                    body += chunk
    except TimeoutError:
        message = f"The body did not end within {limits.body_seconds:g} seconds"
        raise (too_large if size > most else ApiError(408, message, headers=close)) from None
    if size > most:
        raise too_large
    return bytes(body)


def decoded(body: bytes) -> Any:
    """JSON as its standard has it: UTF-8, no key twice, no NaN, no number beyond float64. Raises `ApiError`."""
    if not body:
        raise ApiError(400, "The body is empty; it must be a JSON object")
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_float)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a pair, which is no character
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply") from None
    except UnicodeError as error:
        raise ApiError(400, f"The body is not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"The body is not JSON: {error.msg} at {where}") from None
    except ValueError as error:  # of the hooks, and of an integer of thousands of digits
        raise ApiError(400, f"The body is not JSON: {error}") from None
    return value


def validated(value: Any, kind: type[B]) -> B:
    """Raises `ApiError` for the first field that is wrong."""
    if not isinstance(value, dict):
        raise ApiError(400, f"The body is {_shown(value)}; it must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False)[0], kind) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply") from None


def _wrong(error: ErrorDetails, kind: type[BaseModel]) -> ApiError:
    where = [str(part) for part in error["loc"] if part != "[key]"]
    if where[0] == "response_format":
        del where[1:2]  # the alternative of the union that was tried
    param = ".".join(where)
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(where[0], kind.model_fields) if len(where) == 1 else ""
        return ApiError(400, f"Unknown field {param[:200]!r}.{hint}", param=param, code="unknown_field")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_field")
    message = (
        error["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
    )
    return ApiError(400, f"{param} is {_shown(error['input'])}: {message}", param=param, code="invalid_value")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} stands twice in an object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:30]} is beyond float64")
    return value
