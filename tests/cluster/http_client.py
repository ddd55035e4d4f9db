"""A client of the endpoint inside the test's own event loop, and how to read its answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

from cluster.http_api import build_app
from tests.cluster.completion_services import WAIT

if TYPE_CHECKING:
    from cluster.http_api import CompletionService


def client_of(service: CompletionService) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WAIT)


async def post(service: CompletionService, **fields: Any) -> httpx.Response:  # noqa: ANN401
    body = {"model": service.model_name, "prompt": "Once"} | fields
    async with client_of(service) as client:
        return await client.post("/v1/completions", json=body)


def events(response: httpx.Response) -> list[Any]:
    """The data of every event; the last one of a complete stream is the text [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    pieces = response.text.split("\n\n")
    assert pieces.pop() == ""
    data = [piece.removeprefix("data: ") for piece in pieces]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
