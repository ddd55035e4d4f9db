"""The OpenAI-compatible HTTP endpoint over any CompletionService.

One completion, in order: content type, room, body, model and parameters are checked; the service
generates; the answer goes out whole, or as server-sent events. While it runs, a watcher waits for
the client to go away; then the generation is closed, which aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.api_calls import BODIES, checked_call
from cluster.api_errors import (
    ApiError,
    body_too_large,
    overloaded,
    timed_out,
    to_api_error,
    unsupported_media_type,
)
from cluster.api_types import ModelCard, ModelList
from cluster.http_reply import ClientGoneError, Reply, error_response, while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Receive, Scope, Send

    from cluster.api_calls import Call
    from cluster.api_chat import ChatCompletionRequest
    from cluster.api_types import CompletionRequest
    from cluster.tokenizer import Tokenizer
    from protocol.config import ApiSettings
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT = 5.0
"""Seconds after which a service that does not say how it is counts as not ready."""


class CompletionService(Protocol):
    """What stands behind the endpoint: one served model and an engine that runs it."""

    @property
    def model_name(self) -> str:
        """The name that clients put into `model`."""

    @property
    def limits(self) -> ApiSettings:
        """Limits of the endpoint."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def max_loops(self) -> int:
        """Loops of a full pass of the model."""

    async def health(self) -> str | None:
        """None when a request would run now, else why not."""

    def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, those of each choice in order up to its finish reason.

        Only requests of one `tenant` share cached prompts.
        The seed in `params` is resolved. Closing the generator, or cancelling whoever waits for
        it, aborts the request. Raises RequestError, OverloadedError and other LoopmeshErrors
        before the first output when the request is not admitted.
        """

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a choice after an output that `generate` gave; one that has ended is ignored.

        `request_id` stands in its outputs. Never fails: the generator is closed after it.
        """


def build_app(service: CompletionService) -> Starlette:
    """The ASGI application: the paths of BODIES, /v1/models and /health."""

    async def models(_: Request) -> Response:
        body = ModelList(data=(ModelCard(id=service.model_name),))
        return Response(body.model_dump_json(), media_type="application/json")

    async def health(_: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                reason = await service.health()
        except TimeoutError:
            reason = f"no answer from the engine within {HEALTH_TIMEOUT:g} s"
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    room = Room(service.limits.max_requests)
    generating = [
        Route(path, CompletionRoute(service, request, room), methods=["POST"])
        for path, request in BODIES.items()
    ]
    return Starlette(
        routes=[
            *generating,
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    message = (
        f"{request.method} {request.url.path} is not served here: there are "
        f"POST {' and '.join(BODIES)}, GET /v1/models and GET /health"
    )
    response = error_response(ApiError(status, "invalid_request_error", code, message))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


class Room:
    """The requests between their admission and their last byte, on all paths that generate.

    Owner: the application. Mutated only by: `taken`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count one request in, or refuse it."""
        if self._running >= self._limit:
            raise overloaded(f"{self._limit} requests are running, the most allowed: try again")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class CompletionRoute:
    """POST to one of BODIES. Owner: the application. Immutable."""

    def __init__(
        self,
        service: CompletionService,
        request: type[CompletionRequest] | type[ChatCompletionRequest],
        room: Room,
    ) -> None:
        self._service = service
        self._request = request
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens to it."""
        request = Request(scope, receive)
        reply = Reply(request, send)
        try:
            _require_json(request)
            with self._room.taken():
                async with asyncio.timeout(self._service.limits.request_timeout) as clock:
                    call = self._check(await self._read(request))
                    answer = self._answer(call, tenant_of(request), reply)
                    await while_connected(request, answer)
        except (ClientGoneError, ClientDisconnect):
            logger.info("a client went away before its answer was complete")
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                error = timed_out(self._service.limits.request_timeout)
            await reply.fail(_reported(error))

    async def _read(self, request: Request) -> bytes:
        """The body, never more of it in memory than allowed."""
        limit = self._service.limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise body_too_large(limit)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise body_too_large(limit)
        return bytes(body)

    def _check(self, raw: bytes) -> Call:
        service = self._service
        body = self._request.model_validate_json(raw)
        name, created = uuid.uuid4().hex, int(time.time())
        return checked_call(body, service.model_name, service.tokenizer, name, created, None)

    async def _answer(self, call: Call, tenant: str, reply: Reply) -> None:
        """Generate and send, each event as soon as its output is there."""
        assembler = call.assembler(self._service.max_loops)
        generation = self._service.generate(call.prompt, call.params, tenant=tenant)
        opened = not call.body.stream
        async with aclosing(generation) as outputs:
            async for output in outputs:
                delta = assembler.push(output)
                if delta is None:
                    continue
                if not opened:
                    opened = True
                    for event in call.opening():
                        await reply.event(event)
                if call.body.stream:
                    await reply.event(call.event(delta))
                choice = output.choice
                if (index := assembler.stop_index(choice)) is not None:
                    await self._service.finish(output.key.request_id, index, choice)
                if assembler.finished:
                    break
        completion = assembler.completion()
        if call.body.stream:
            for event in (*call.closing(completion), "[DONE]"):
                await reply.event(event)
            await reply.end()
        else:
            await reply.whole(Response(call.answer(completion), media_type="application/json"))


def tenant_of(request: Request) -> str:
    """Whose cached prompts a request may find: those sent with the same credentials.

    A digest, so that no key travels further than here; requests without credentials share one.
    """
    credentials = request.headers.get("authorization", "")
    return hashlib.sha256(credentials.encode()).hexdigest() if credentials else ""


def _require_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise unsupported_media_type(content_type)


def _reported(error: Exception) -> ApiError:
    """`error` as an answer; one that nobody foresaw also goes to the log."""
    answer = to_api_error(error)
    if answer.status == 500:
        logger.error("a completion failed", exc_info=error)
    return answer
