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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.api_errors import (
    ApiError,
    body_too_large,
    invalid_request,
    model_not_found,
    overloaded,
    timed_out,
    to_api_error,
    unsupported_media_type,
)
from cluster.api_types import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    Usage,
)
from cluster.choices import ChoiceAssembler
from cluster.generation import resolve_seed
from cluster.http_reply import ClientGoneError, Reply, error_response, while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Receive, Scope, Send

    from cluster.generation import Completion, TextDelta
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
    """The ASGI application: /v1/completions, /v1/models and /health."""

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

    return Starlette(
        routes=[
            Route("/v1/completions", CompletionRoute(service), methods=["POST"]),
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
        "POST /v1/completions, GET /v1/models and GET /health"
    )
    response = error_response(ApiError(status, "invalid_request_error", code, message))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked completion request; `response_id` and `created` stand in all its events."""

    body: CompletionRequest
    prompt: list[int]
    params: SamplingParams
    seed: int
    tenant: str
    response_id: str
    created: int

    def response(
        self, model: str, choices: tuple[Choice, ...], **usage: Usage | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.response_id,
            object="text_completion",
            created=self.created,
            model=model,
            choices=choices,
            **usage,
        )


class CompletionRoute:
    """POST /v1/completions. Owner: the application. Mutated only by: its own calls.

    `_running` counts the requests between their admission here and their last byte.
    """

    def __init__(self, service: CompletionService) -> None:
        self._service = service
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens to it."""
        request = Request(scope, receive)
        reply = Reply(request, send)
        try:
            _require_json(request)
            with self._room():
                async with asyncio.timeout(self._service.limits.request_timeout) as clock:
                    call = self._check(await self._read(request), tenant_of(request))
                    await while_connected(request, self._answer(call, reply))
        except (ClientGoneError, ClientDisconnect):
            logger.info("a client went away before its answer was complete")
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                error = timed_out(self._service.limits.request_timeout)
            await reply.fail(_reported(error))

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Count one request in, or refuse it."""
        limit = self._service.limits.max_requests
        if self._running >= limit:
            raise overloaded(f"{limit} requests are running, the most allowed: try again")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

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

    def _check(self, raw: bytes, tenant: str) -> _Call:
        service = self._service
        body = CompletionRequest.model_validate_json(raw)
        if body.model != service.model_name:
            raise model_not_found(body.model, service.model_name)
        params = body.to_sampling_params()
        if isinstance(body.prompt, str):
            prompt = service.tokenizer.encode(body.prompt)
        else:
            prompt = list(body.prompt)
        if not prompt:
            raise invalid_request("prompt: empty; send at least one token", "prompt")
        seed = resolve_seed(params.seed)
        return _Call(
            body=body,
            prompt=prompt,
            params=params.model_copy(update={"seed": seed}),
            seed=seed,
            tenant=tenant,
            response_id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
        )

    async def _answer(self, call: _Call, reply: Reply) -> None:
        """Generate and send, each event as soon as its output is there."""
        assembler = ChoiceAssembler(
            self._service.tokenizer,
            n=call.params.n,
            prompt_tokens=len(call.prompt),
            max_loops=self._service.max_loops,
            seed=call.seed,
            stop=call.body.stop,
        )
        generation = self._service.generate(call.prompt, call.params, tenant=call.tenant)
        async with aclosing(generation) as outputs:
            async for output in outputs:
                delta = assembler.push(output)
                if delta is None:
                    continue
                if call.body.stream:
                    await reply.event(self._event(call, delta))
                choice = output.choice
                if (index := assembler.stop_index(choice)) is not None:
                    await self._service.finish(output.key.request_id, index, choice)
                if assembler.finished:
                    break
        completion = assembler.completion()
        if call.body.stream:
            await self._end_stream(call, completion, reply)
        else:
            parts = (Choice.of(part, self._service.tokenizer) for part in completion.choices)
            usage = Usage.of(completion)
            body = call.response(self._service.model_name, tuple(parts), usage=usage)
            await reply.whole(Response(body.to_json(), media_type="application/json"))

    def _event(self, call: _Call, delta: TextDelta) -> str:
        usage = {"usage": None} if call.body.include_usage else {}
        choice = Choice.of(delta, self._service.tokenizer)
        return call.response(self._service.model_name, (choice,), **usage).to_json()

    async def _end_stream(self, call: _Call, completion: Completion, reply: Reply) -> None:
        if call.body.include_usage:
            last = call.response(self._service.model_name, (), usage=Usage.of(completion))
            await reply.event(last.to_json())
        await reply.event("[DONE]")
        await reply.end()


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
