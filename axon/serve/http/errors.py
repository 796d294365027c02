"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from axon.errors import UserError

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, or cannot be finished.

    Args:
        param: the field that is wrong. code: for programs. headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error as a response, or an event of a stream, says it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unavailable(message: str, seconds: int = 5) -> ApiError:
    """503: ask again, or elsewhere, in so many seconds."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(seconds)})


def overloaded(message: str) -> ApiError:
    """429: ask again in a second."""
    return ApiError(429, message, code="overloaded", headers={"Retry-After": "1"})


async def _refused(request: Request, error: ApiError) -> Response:
    return error.response()


async def _mistaken(request: Request, error: Exception) -> Response:
    return ApiError(400, str(error)).response()


async def _unrouted(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    message = f"{request.method} {request.url.path[:200]}: {error.detail}. The API is described at /openapi.json"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _gone(request: Request, error: Exception) -> None:
    """Nobody is left to answer."""


async def _broken(request: Request, error: Exception) -> Response:
    return ApiError(500, "An error in the server: its log has more").response()


HANDLERS: Mapping[Any, Any] = {
    ApiError: _refused,
    UserError: _mistaken,
    HTTPException: _unrouted,
    ClientDisconnect: _gone,
    Exception: _broken,
}
"""Exception → what is answered."""
