from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from protocol.errors import (
    CapacityError,
    LoopmeshError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from tests.cluster.completion_services import TOKENIZER, WAIT, PlayedService, output
from tests.cluster.http_client import client_of, error_of, events, post

if TYPE_CHECKING:
    import httpx

HELLO = TOKENIZER.encode("Hello wide world")
WHOLE = [
    *(output(i, (token,)) for i, token in enumerate(HELLO)),
    output(len(HELLO), (0,), FinishReason.STOP),
]


def test_a_whole_answer() -> None:
    service = PlayedService(*WHOLE)
    response = asyncio.run(post(service, seed=5, temperature=0.5))
    body = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "played")
    count = len(HELLO) + 1
    assert body["choices"] == [
        {
            "text": "Hello wide world",
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [*HELLO, 0],
            "exit_depths": [4] + [2] * (count - 1),
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": count,
        "total_tokens": 1 + count,
        "loops_run": 4 + 2 * (count - 1),
        "loops_saved": 2 * (count - 1),
    }
    ((prompt, params),) = service.calls
    assert prompt == TOKENIZER.encode("Once")
    assert params == SamplingParams(temperature=0.5, seed=5)
    assert service.closed == 1


def test_only_the_same_credentials_share_cached_prompts() -> None:
    service = PlayedService(*WHOLE)
    body = {"model": "played", "prompt": "Once"}

    async def ask() -> None:
        async with client_of(service) as client:
            for key in (None, "Bearer one", "Bearer one", "Bearer two"):
                headers = {} if key is None else {"authorization": key}
                await client.post("/v1/completions", json=body, headers=headers)

    asyncio.run(ask())
    nobody, one, again, two = service.tenants
    assert nobody == ""
    assert one == again
    assert len({nobody, one, two}) == 3
    assert "one" not in one


def test_a_stream_has_one_event_an_output() -> None:
    answer = events(asyncio.run(post(PlayedService(*WHOLE), stream=True)))
    assert answer.pop() == "[DONE]"
    assert len(answer) == len(WHOLE)
    assert len({event["id"] for event in answer}) == 1
    choices = [event["choices"][0] for event in answer]
    assert "".join(choice["text"] for choice in choices) == "Hello wide world"
    assert [choice["token_ids"] for choice in choices] == [[token] for token in [*HELLO, 0]]
    assert [choice["finish_reason"] for choice in choices] == [None] * len(HELLO) + ["stop"]
    assert not any("usage" in event for event in answer)


def test_a_stream_counts_when_asked() -> None:
    response = asyncio.run(
        post(PlayedService(*WHOLE), stream=True, stream_options={"include_usage": True})
    )
    *pieces, last, done = events(response)
    assert done == "[DONE]"
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(HELLO) + 1


def test_a_missing_seed_is_drawn_for_each_request() -> None:
    service = PlayedService(*WHOLE)

    async def twice() -> None:
        await post(service)
        await post(service)

    asyncio.run(twice())
    seeds = {params.seed for _, params in service.calls}
    assert None not in seeds
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"surprise": 1}, "surprise"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_never_reaches_the_engine(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    service = PlayedService(*WHOLE)
    response = asyncio.run(post(service, stream=stream, **fields))
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert error_of(response)["type"] == "invalid_request_error"
    assert service.calls == []


def test_another_model_is_not_found() -> None:
    response = asyncio.run(post(PlayedService(*WHOLE), model="other"))
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert "'played'" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestError("no"), 400, None),
        (CapacityError("needs 9 blocks of 8"), 400, None),
        (OverloadedError("full"), 429, "1"),
        (WorkerLostError("no worker"), 503, "1"),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
def test_a_refused_request_keeps_its_status(
    error: Exception, status: int, retry: str | None, stream: bool
) -> None:
    service = PlayedService(error)
    response = asyncio.run(post(service, stream=stream))
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert "secret" not in response.text
    assert error_of(response)["message"]
    assert service.closed == 1


FAILED = output(1, (), FinishReason.ERROR, "lane-0 was closed: worker gone")


@pytest.mark.parametrize("failure", [FAILED, LoopmeshError("worker gone"), output(7, (5,))])
def test_a_failure_in_a_stream_is_its_last_event(failure: Any) -> None:  # noqa: ANN401
    service = PlayedService(output(0, (5,)), failure)
    first, last = events(asyncio.run(post(service, stream=True)))
    assert first["choices"][0]["token_ids"] == [5]
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    assert service.closed == 1


def test_a_failed_request_without_a_stream_has_its_reason() -> None:
    response = asyncio.run(post(PlayedService(output(0, (5,)), FAILED)))
    assert response.status_code == 500
    assert "worker gone" in error_of(response)["message"]


def test_a_request_over_its_time_is_aborted() -> None:
    service = PlayedService(request_timeout=1.0)
    response = asyncio.run(post(service))
    assert response.status_code == 504
    assert error_of(response)["code"] == "request_timeout"
    assert service.closed == 1


def test_a_stream_over_its_time_ends_with_an_error() -> None:
    service = PlayedService(output(0, (5,)), request_timeout=1.0)
    first, last = events(asyncio.run(post(service, stream=True)))
    assert first["choices"][0]["token_ids"] == [5]
    assert last["error"]["code"] == "request_timeout"
    assert service.closed == 1


def test_more_requests_than_allowed_are_turned_away() -> None:
    service = PlayedService(max_requests=1)

    async def scene() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        async with client_of(service) as client:
            body = {"model": "played", "prompt": "Once"}
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.wait_for(service.started.wait(), WAIT)
            second = await client.post("/v1/completions", json=body)
            service.go_on.set()
            return await first, second, await client.post("/v1/completions", json=body)

    first, second, third = asyncio.run(scene())
    assert first.status_code == 200
    assert second.status_code == 429
    assert second.headers["retry-after"] == "1"
    assert error_of(second)["type"] == "overloaded"
    assert third.status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_json_is_415(content_type: str | None) -> None:
    async def scene() -> httpx.Response:
        headers = {} if content_type is None else {"content-type": content_type}
        async with client_of(PlayedService(*WHOLE)) as client:
            return await client.post("/v1/completions", content=b"{}", headers=headers)

    response = asyncio.run(scene())
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("size", "status"), [(200, 200), (201, 413)])
def test_a_body_is_read_up_to_its_limit(declared: bool, size: int, status: int) -> None:
    async def scene() -> httpx.Response:
        body = json.dumps({"model": "played", "prompt": "Once"}).encode().ljust(size)

        async def chunks() -> Any:  # noqa: ANN401
            for start in range(0, size, 64):
                yield body[start : start + 64]

        async with client_of(PlayedService(*WHOLE, max_body_bytes=200)) as client:
            headers = {"content-type": "application/json; charset=utf-8"}
            content = body if declared else chunks()
            return await client.post("/v1/completions", content=content, headers=headers)

    response = asyncio.run(scene())
    assert response.status_code == status
    if status == 413:
        assert "200 bytes" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_an_unknown_route_has_the_same_error_shape(method: str, path: str, status: int) -> None:
    async def scene() -> httpx.Response:
        async with client_of(PlayedService()) as client:
            return await client.request(method, path)

    response = asyncio.run(scene())
    assert response.status_code == status
    assert "POST /v1/completions" in error_of(response)["message"]
    assert ("allow" in response.headers) == (status == 405)


def test_the_served_model_is_listed() -> None:
    async def scene() -> Any:  # noqa: ANN401
        async with client_of(PlayedService()) as client:
            return (await client.get("/v1/models")).json()

    card = {"id": "played", "object": "model", "created": 0, "owned_by": "loopmesh"}
    assert asyncio.run(scene()) == {"object": "list", "data": [card]}


def test_health_says_why_not() -> None:
    service = PlayedService()

    async def scene() -> list[httpx.Response]:
        async with client_of(service) as client:
            ready = await client.get("/health")
            service.reason = "the first token has not come yet"
            return [ready, await client.get("/health")]

    ready, unready = asyncio.run(scene())
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert unready.status_code == 503
    assert unready.json() == {
        "status": "unavailable",
        "reason": "the first token has not come yet",
    }
