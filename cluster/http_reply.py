"""The answering half of one HTTP request: whole, as server-sent events, or as an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request
    from starlette.types import Send

    from cluster.api_errors import ApiError

LAST_WORD_TIMEOUT = 5.0
"""Seconds that a client has to take the error that ends its request."""

EVENT_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def error_response(error: ApiError) -> Response:
    """The whole answer that reports `error`."""
    return Response(
        error.body(), error.status, dict(error.headers()), media_type="application/json"
    )


class Reply:
    """What has been sent for one request. Owner: its route. Mutated only by: its own methods.

    The status line leaves with the first event, so whatever fails before it still has a status of
    its own. What fails later becomes a last event with the error, and no [DONE].
    """

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._streaming = False

    async def whole(self, response: Response) -> None:
        """Send a complete answer."""
        await response(self._request.scope, self._request.receive, self._send)

    async def event(self, data: str) -> None:
        """Send one server-sent event."""
        if not self._streaming:
            self._streaming = True
            head = Response(headers=EVENT_STREAM_HEADERS, media_type="text/event-stream")
            headers = [pair for pair in head.raw_headers if pair[0] != b"content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._body(f"data: {data}\n\n".encode(), more=True)

    async def end(self) -> None:
        """End the stream after its last event."""
        await self._body(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """Send `error` as the answer, or as the last event of a stream.

        A client that does not take it in time loses its connection instead.
        """
        try:
            async with asyncio.timeout(LAST_WORD_TIMEOUT):
                if self._streaming:
                    await self.event(error.body().decode())
                    await self.end()
                else:
                    await self.whole(error_response(error))
        except TimeoutError:
            return

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def while_connected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the client goes away.

    The request's body must have been read. Raises ClientGoneError, or what `work` raises.
    """
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGoneError
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)
    running.result()


async def _disconnect(request: Request) -> None:
    """Wait until the server says that the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
