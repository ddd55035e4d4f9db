"""Errors as HTTP answers in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import ValidationError

from protocol.errors import (
    DeadlineError,
    ExecutorClosedError,
    LoopmeshError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """One failed HTTP request: its status and what the error body says.

    `type` is the family that a client branches on, `code` the exact case, `param` the wrong field.
    """

    def __init__(
        self,
        status: int,
        type: str,  # noqa: A002, RUF100 - the field's name in the public body
        code: str,
        message: str,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The JSON of the answer, also the data of an error event in a stream."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> Mapping[str, str]:
        """Retry-After where the same request may work later, else nothing."""
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
        return {}


def invalid_request(message: str, param: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, "invalid_request_error", "invalid_request", message, param)


def model_not_found(model: str, served: str) -> ApiError:
    """404: the body names another model than the one served."""
    message = f"the model {model!r} is not served here: use {served!r}"
    return ApiError(404, "invalid_request_error", "model_not_found", message, "model")


def body_too_large(limit: int) -> ApiError:
    """413: more bytes than the endpoint takes."""
    message = f"the body has more than {limit} bytes, the most allowed: shorten the prompt"
    return ApiError(413, "invalid_request_error", "body_too_large", message)


def unsupported_media_type(found: str) -> ApiError:
    """415: the body is no JSON, or does not say so."""
    message = f"content-type {found or 'is missing'}: send application/json"
    return ApiError(415, "invalid_request_error", "unsupported_media_type", message)


def overloaded(message: str) -> ApiError:
    """429: no room now, try again."""
    return ApiError(429, "overloaded", "overloaded", message)


def unavailable(message: str) -> ApiError:
    """503: the service cannot run any request now."""
    return ApiError(503, "unavailable", "unavailable", message)


def timed_out(seconds: float) -> ApiError:
    """504: the request ran longer than the endpoint allows."""
    message = (
        f"the request took longer than {seconds:g} s and was aborted: ask for fewer tokens, "
        "or raise api.request_timeout"
    )
    return ApiError(504, "timeout", "request_timeout", message)


def to_api_error(error: Exception) -> ApiError:
    """The HTTP answer to any exception; an unforeseen one tells nothing of the inside."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error)
        case RequestError():
            return invalid_request(str(error))
        case OverloadedError():
            return overloaded(str(error))
        case WorkerLostError() | ExecutorClosedError() | DeadlineError():
            return unavailable(str(error))
        case LoopmeshError():
            return ApiError(500, "server_error", "server_error", str(error))
        case _:
            message = "an unexpected error; the server's log holds the details"
            return ApiError(500, "server_error", "server_error", message)


def _from_validation(error: ValidationError) -> ApiError:
    """400 that names the first wrong field, and its value's fault in pydantic's words."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not supported: leave it out"
    return invalid_request(f"{param}: {message}" if param else message, param)
