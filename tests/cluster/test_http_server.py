from __future__ import annotations

import asyncio
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from cluster.http_api import build_app
from protocol.exit_rule import FinishReason
from tests.cluster.completion_services import (
    WAIT,
    PlayedService,
    engine_service,
    output,
    running_server,
)
from tests.cluster.http_client import error_of, events, post

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.completion_services import RunningServer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outputs", [0, 1])
def test_a_client_that_goes_away_closes_its_generation(stream: bool, outputs: int) -> None:
    """By hand at the ASGI interface: the client is gone once the service waits."""
    service = PlayedService(*(output(i, (5,)) for i in range(outputs)))
    sent: list[Any] = []
    raw = json.dumps({"model": "played", "prompt": "Once", "stream": stream}).encode()
    messages = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> Any:  # noqa: ANN401
        for message in messages:
            return message
        await service.started.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(asyncio.wait_for(build_app(service)(scope, receive, send), WAIT))
    assert service.closed == 1
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert len(bodies) == (outputs if stream else 0)
    assert all(message["more_body"] for message in bodies)


def test_an_engine_behind_the_endpoint() -> None:
    """HTTP gives what the engine gives, streamed or not, and long prompts are refused."""

    async def scene() -> None:
        async with engine_service() as service:
            wish = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.0}
            wish["exit_threshold"] = 0.9
            whole = (await post(service, **wish)).json()
            pieces = events(await post(service, stream=True, **wish))
            assert pieces.pop() == "[DONE]"
            choices = [piece["choices"][0] for piece in pieces]
            (answer,) = whole["choices"]
            for name in ("token_ids", "exit_depths"):
                assert [*chain(*(choice[name] for choice in choices))] == answer[name]
            assert "".join(choice["text"] for choice in choices) == answer["text"]
            assert answer["token_ids"][:4] == [14, 439, 266, 1066]
            assert whole["usage"]["loops_saved"] > 0
            for stream in (False, True):
                long = await post(service, prompt=[5] * 4000, stream=stream)
                assert (long.status_code, error_of(long)["type"]) == (400, "invalid_request_error")
                outside = await post(service, prompt=[5, 70000], stream=stream)
                assert outside.status_code == 400

    asyncio.run(scene())


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_the_openai_client_whole_and_streamed(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["ouro-tiny"]
        wish: dict[str, Any] = {
            "model": "ouro-tiny",
            "prompt": "Once upon a time",
            "max_tokens": 16,
            "temperature": 0,
            "extra_body": {"exit_threshold": 0.9},
        }
        whole = client.completions.create(**wish)
        pieces = list(client.completions.create(stream=True, **wish))
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "length"
        assert whole.usage is not None
        # A plan of several ticks brings several tokens at once; how many is a matter of speed.
        assert whole.usage.completion_tokens == 16 >= len(pieces) > 1
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="one prompt per request"):
            client.completions.create(model="ouro-tiny", prompt=["x", "y"])


def test_the_openai_client_with_penalties_and_bias(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wish: dict[str, Any] = {
            "model": "ouro-tiny",
            "prompt": "Once upon a time",
            "max_tokens": 24,
            "temperature": 0,
        }

        def ids(**fields: Any) -> list[int]:  # noqa: ANN401
            answer = client.completions.create(**(wish | fields))
            return answer.choices[0].token_ids  # type: ignore[no-any-return]

        plain = ids(presence_penalty=0, frequency_penalty=0.0, logit_bias={})
        assert plain == ids()
        assert len(set(plain)) < len(plain)
        assert ids(logit_bias={str(plain[0]): -100})[0] != plain[0]
        assert ids(logit_bias={"5": 100}) == [5] * 24
        assert ids(presence_penalty=2, frequency_penalty=2) != plain
        wide = ids(extra_body={"repetition_penalty": 1e6})
        assert len(set(wide)) == len(wide)
        stopped = ids(extra_body={"stop_token_ids": plain[:1], "min_tokens": 3})
        assert len(stopped) >= 3
        assert plain[0] not in stopped[:3]
        for field, value in (
            ("logit_bias", {"9999": 1}),
            ("logit_bias", {"5": 101}),
            ("presence_penalty", 3),
        ):
            with pytest.raises(openai.BadRequestError, match=field):
                ids(**{field: value})


def test_the_openai_client_with_logprobs(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wish: dict[str, Any] = {
            "model": "ouro-tiny",
            "prompt": "Once upon a time",
            "max_tokens": 12,
            "temperature": 0.7,
            "seed": 3,
        }
        plain = client.completions.create(**wish).choices[0]
        assert plain.logprobs is None
        whole = client.completions.create(logprobs=3, **wish).choices[0]
        assert whole.text == plain.text
        told = whole.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.text_offset is not None
        assert told.top_logprobs is not None
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 12
        entries = zip(
            told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
        )
        for token, value, top, offset in entries:
            assert whole.text[offset : offset + len(token)] == token
            assert 3 <= len(top) <= 4
            assert top[token] == value <= 0.0
        pieces = [
            piece.choices[0].logprobs
            for piece in client.completions.create(logprobs=3, stream=True, **wish)
        ]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [*chain(*(getattr(piece, name) for piece in pieces if piece))]
            expected = getattr(told, name)
            if name == "top_logprobs":
                assert [set(top) for top in streamed] == [set(top) for top in expected]
            else:
                assert streamed == (
                    pytest.approx(expected, abs=1e-4) if name == "token_logprobs" else expected
                )
        (none,) = client.completions.create(logprobs=0, **(wish | {"max_tokens": 1})).choices
        assert none.logprobs is not None
        assert none.logprobs.top_logprobs is not None
        assert len(none.logprobs.top_logprobs[0]) == 1
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.completions.create(logprobs=21, **wish)


def test_the_openai_client_with_stop_strings(server: RunningServer) -> None:
    async def ends() -> tuple[int, int]:
        await server.service.rest()
        finished = server.service.engine.stats().finished
        return finished.get(FinishReason.STOP, 0), finished.get(FinishReason.ABORT, 0)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wish: dict[str, Any] = {
            "model": "ouro-tiny",
            "prompt": "Once upon a time",
            "max_tokens": 24,
            "temperature": 0,
        }
        plain = client.completions.create(**wish).choices[0].text
        middle = len(plain) // 2
        stop = plain[middle : middle + 7]
        stops, aborts = server.call(ends())
        for value in (stop, [stop], ["never in it", stop]):
            whole = client.completions.create(stop=value, **wish)
            (choice,) = whole.choices
            assert choice.text == plain[: plain.index(stop)]
            assert choice.finish_reason == "stop"
            assert whole.usage is not None
            assert whole.usage.completion_tokens < 24
            pieces = list(client.completions.create(stop=value, stream=True, **wish))
            assert "".join(piece.choices[0].text for piece in pieces) == choice.text
            assert pieces[-1].choices[0].finish_reason == "stop"
        assert server.call(ends()) == (stops + 6, aborts)
        with pytest.raises(openai.BadRequestError, match="stop"):
            client.completions.create(stop=["a", "b", "c", "d", "e"], **wish)


def test_many_openai_clients_at_once(server: RunningServer) -> None:
    async def scene() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="ouro-tiny",
                        prompt=f"{seed} foxes",
                        max_tokens=8,
                        seed=seed,
                        extra_body={"ignore_eos": True},
                    )
                    for seed in range(32)
                )
            )
            again = await client.completions.create(
                model="ouro-tiny",
                prompt="7 foxes",
                max_tokens=8,
                seed=7,
                extra_body={"ignore_eos": True},
            )
        assert all(answer.usage and answer.usage.completion_tokens == 8 for answer in answers)
        assert again.choices[0].text == answers[7].choices[0].text

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_client_that_goes_away_gives_its_blocks_back(
    server: RunningServer, stream: bool
) -> None:
    async def fresh_events() -> None:
        server.service.admitted.clear()
        server.service.aborted.clear()

    async def at_rest() -> tuple[int, int]:
        await asyncio.wait_for(server.service.aborted.wait(), WAIT)
        await server.service.rest()
        stats = server.service.engine.stats()
        return stats.free_blocks, stats.total_blocks

    async def begun() -> None:
        await asyncio.wait_for(server.service.admitted.wait(), WAIT)

    async def leave() -> None:
        body = {"model": "ouro-tiny", "prompt": "Once", "max_tokens": 1900, "stream": stream}
        body["ignore_eos"] = True
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT) as client:
            if stream:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        assert line.startswith("data: ")
                        break
            else:
                call = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.to_thread(server.call, begun())
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call

    server.call(fresh_events())
    asyncio.run(leave())
    free, total = server.call(at_rest())
    assert free == total
