"""What an ingress tells of its requests: how long they took, and which were turned away."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster import metric_table as table
from cluster.metrics import counter, histogram
from protocol.errors import CapacityError, LoopmeshError, OverloadedError, RequestError
from protocol.exit_rule import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from scheduler.output import RequestOutput

OTHER_ROUTE = "other"


@dataclass(slots=True)
class _Choice:
    """Times of one choice, in seconds. Owner: RequestMetrics, which alone mutates it."""

    first: float
    last: float
    tokens: int


@dataclass(slots=True)
class _Passing:
    """A request on its way. Owner: RequestMetrics, which alone mutates it.

    `complete` has the choices that ended as they should.
    """

    started: float
    complete: set[int] = field(default_factory=set)
    choices: dict[int, _Choice] = field(default_factory=dict)


class RequestMetrics:
    """One ingress's. Owner: the ingress. Mutated only by: its methods, on its event loop.

    `clock` tells seconds of any monotonic clock.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_tokens = counter(table.PROMPT_TOKENS, model)
        self._rejections = counter(table.REJECTIONS, model)
        self._responses = counter(table.RESPONSES, model)
        self._first = histogram(table.FIRST_TOKEN, model)
        self._between = histogram(table.BETWEEN_OUTPUTS, model)
        self._per_token = histogram(table.PER_TOKEN, model)
        self._whole = histogram(table.WHOLE, model)
        self._passing: dict[str, _Passing] = {}

    async def observed(
        self, outputs: AsyncGenerator[RequestOutput, None], prompt_tokens: int, choices: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs, timed; closing it closes them."""
        passing = _Passing(self._clock())
        request_id = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if request_id is None:
                        request_id = output.key.request_id
                        self._passing[request_id] = passing
                        self._prompt_tokens.inc(prompt_tokens)
                    self._note(passing, output, self._clock())
                    yield output
        except LoopmeshError as error:
            if request_id is None:
                self._rejections.inc(tags={"reason": rejection(error)})
            raise
        finally:
            if request_id is not None:
                del self._passing[request_id]
            if len(passing.complete) == choices:
                self._whole.observe(self._clock() - passing.started)

    def finished(self, request_id: str, choice: int) -> None:
        """The text of a choice is complete: no more of it is waited for."""
        passing = self._passing.get(request_id)
        if passing is not None:
            self._end(passing, choice)

    def responded(self, route: str, code: int) -> None:
        """An HTTP answer has begun."""
        self._responses.inc(tags={"route": route, "code": str(code)})

    def _note(self, passing: _Passing, output: RequestOutput, now: float) -> None:
        choice = passing.choices.get(output.choice)
        if choice is None:
            if output.tokens:
                if not passing.choices:
                    self._first.observe(now - passing.started)
                passing.choices[output.choice] = _Choice(now, now, len(output.tokens))
        elif output.tokens:
            self._between.observe(now - choice.last)
            choice.last = now
            choice.tokens += len(output.tokens)
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._end(passing, output.choice)

    def _end(self, passing: _Passing, choice: int) -> None:
        if choice in passing.complete:  # its text had ended before the engine's word of it
            return
        passing.complete.add(choice)
        times = passing.choices.get(choice)
        if times is not None and times.tokens > 1:
            self._per_token.observe((times.last - times.first) / (times.tokens - 1))


class CountResponses:
    """ASGI middleware: each answer by route and status. Owner: the application."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, routes: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count how its answer begins."""
        # Whatever clients invent is one route: a label takes few values.
        path = scope.get("path", "")
        route = path if path in self._routes else OTHER_ROUTE

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def rejection(error: LoopmeshError) -> str:
    """Why a request was not taken, in one of four words."""
    match error:
        case OverloadedError():
            return "queue_full"
        case CapacityError():
            return "too_large"
        case RequestError():
            return "invalid"
        case _:
            return "unavailable"
