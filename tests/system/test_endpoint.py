"""The real endpoint: Ray Serve on a local cluster, two workers, HTTP and openai clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from ray import serve

from cluster.ports import free_port
from cluster.server import APPLICATION, serving
from protocol.config import (
    ApiSettings,
    CacheSettings,
    ClusterSettings,
    Configuration,
    WorkerSettings,
)
from protocol.errors import ConfigError
from tests.ray_cluster import eventually, live_placement_groups, local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.stats import EngineStats

pytestmark = pytest.mark.ray

MODEL = "ouro-tiny"
NUM_BLOCKS = 768
CONFIGURATION = Configuration(
    worker=WorkerSettings(
        cache=CacheSettings(num_blocks=NUM_BLOCKS), device="cpu", num_slots=8, num_threads=1
    ),
    cluster=ClusterSettings(num_workers=2, beat_interval=0.1),
    api=ApiSettings(consumer_lease=4.0),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_ray():
        with serving(CONFIGURATION, "127.0.0.1", free_port()) as base:
            yield base
        assert eventually(lambda: live_placement_groups() == [])


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as it:
        yield it


@pytest.fixture(autouse=True)
def _nothing_is_left(url: str) -> Iterator[None]:
    """After every test no request lives and every block is free again."""
    yield
    assert eventually(idle), engine_stats()


def engine_stats() -> EngineStats:
    handle = serve.get_deployment_handle("engine", APPLICATION)
    stats: EngineStats = handle.stats.remote().result(timeout_s=20)
    return stats


def idle() -> bool:
    stats = engine_stats()
    at_rest = stats.waiting == stats.running == stats.releasing == stats.rng_keys == 0
    return at_rest and stats.free_blocks == stats.total_blocks == NUM_BLOCKS * len(stats.lanes)


def test_health_is_ready_after_a_real_token(url: str) -> None:
    assert eventually(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 200)
    assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ready"}
    assert engine_stats().tokens >= 1


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "temperature": 0.0,
        "extra_body": {"exit_threshold": 0.9},
    }
    whole = client.completions.create(**wish)
    events = list(
        client.completions.create(**wish, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.text for event in events for choice in event.choices)
    depths = [
        depth
        for event in events
        for choice in event.choices
        for depth in (choice.model_extra or {})["exit_depths"]
    ]
    assert whole.usage is not None
    assert whole.choices[0].text == text
    assert text.startswith(", by the river, there lived a small boy named Felix.")
    assert (whole.choices[0].model_extra or {})["exit_depths"] == depths
    assert len(depths) == whole.usage.completion_tokens == 24
    assert depths[0] == 4
    assert 1 < len([event for event in events if event.choices]) <= 24
    assert events[-1].usage == whole.usage
    assert (whole.usage.model_extra or {})["loops_saved"] == sum(4 - d for d in depths[1:])
    assert whole.choices[0].finish_reason == "length"


def test_a_chat_and_its_stream_say_what_its_prompt_says(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_completion_tokens": 12,
        "temperature": 0.0,
    }
    whole = client.chat.completions.create(**wish)
    pieces = [
        choice.delta.content or ""
        for event in client.chat.completions.create(**wish, stream=True)
        for choice in event.choices
    ]
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    plain = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0.0)
    assert whole.choices[0].message.content == "".join(pieces) == plain.choices[0].text
    assert whole.usage == plain.usage


def test_choices_of_one_request_and_their_stream(url: str, client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12}
    wish |= {"temperature": 1.0, "seed": 5}
    whole = client.completions.create(**wish, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    assert texts[0] == client.completions.create(**wish).choices[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 4
    counts = [len((choice.model_extra or {})["token_ids"]) for choice in whole.choices]
    assert whole.usage.completion_tokens == sum(counts)
    streamed = ["", "", ""]
    for event in client.completions.create(**wish, n=3, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    # A stop string of the last choice alone; the engine is told which one has ended.
    stop = next(
        texts[2][i : i + 6]
        for i in range(4, len(texts[2]) - 6)
        if texts[2][i : i + 6] not in texts[0]
    )
    stopped = client.completions.create(**wish, n=3, stop=stop)
    assert stopped.choices[0].text == texts[0]
    assert stopped.choices[2].text == texts[2][: texts[2].index(stop)]
    with pytest.raises(openai.BadRequestError, match="n 9 takes as many slots"):
        client.completions.create(**wish, n=9)
    aborted = finished("abort")
    with client.completions.create(
        model=MODEL,
        prompt="Once",
        n=3,
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
    assert eventually(lambda: finished("abort") == aborted + 3)


def test_32_at_once_each_get_their_own_answer(url: str) -> None:
    prompts = [f"Once upon a time there were {number} small" for number in range(1, 17)]
    wishes = [
        {"prompt": prompt, "temperature": temperature, "seed": 11, "max_tokens": 12}
        for prompt in prompts
        for temperature in (0.0, 0.7)
    ]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0
        ) as client:
            answers = await asyncio.gather(
                *(client.completions.create(model=MODEL, **wish) for wish in wishes)  # type: ignore[call-overload]
            )
        return [answer.choices[0].text for answer in answers]

    together = asyncio.run(ask_all())
    assert len(together) == 32
    assert all(together)
    assert asyncio.run(ask_all()) == together
    loads = [lane.plans for lane in engine_stats().lanes]
    assert min(loads) > 0


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"model": "gpt-9", "prompt": "x"}, 404, "gpt-9"),
        ({"model": MODEL, "prompt": ""}, 400, "prompt"),
        ({"model": MODEL, "prompt": "word " * 3000}, 400, "2048"),
        ({"model": MODEL, "prompt": "x", "max_tokens": "7"}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "temperature": True}, 400, "temperature"),
        ({"model": MODEL, "prompt": {"a": 1}}, 400, "prompt"),
        ({"model": MODEL, "prompt": "x", "max_loops": 9}, 400, "max_loops"),
        ({"model": MODEL, "prompt": "x", "surprise": 1}, 400, "surprise"),
        ({"prompt": "x"}, 400, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_gets_an_openai_error(
    url: str, body: dict[str, object], status: int, named: str, stream: bool
) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**body, "stream": stream}, timeout=20)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"]


def test_a_request_that_can_never_fit_is_told_the_numbers(url: str) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2000}
    needed = 4 * 125
    assert needed < NUM_BLOCKS
    answer = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 2100}, timeout=20)
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


def test_openai_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted(url: str, stream: bool) -> None:
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": stream,
    }
    aborted = finished("abort")

    async def leave_early() -> None:
        async with httpx.AsyncClient(timeout=20) as http:
            if stream:
                async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line:
                            assert json.loads(line.removeprefix("data: "))["choices"]
                            return
            request = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body))
            while not await asyncio.to_thread(lambda: engine_stats().running):
                assert not request.done()
            request.cancel()

    asyncio.run(leave_early())
    assert eventually(lambda: finished("abort") == aborted + 1)


def finished(reason: str) -> int:
    counts = {key.value: count for key, count in engine_stats().finished.items()}
    return counts.get(reason, 0)


def test_a_second_server_must_share_the_port_that_serve_has(url: str) -> None:
    other = free_port()
    with (
        pytest.raises(ConfigError, match=f"not on 127.0.0.1:{other}"),
        serving(CONFIGURATION, "127.0.0.1", other),
    ):
        pass
    assert httpx.get(f"{url}/health", timeout=20).status_code == 200


def test_a_killed_worker_ends_its_requests_and_the_other_goes_on(
    url: str, client: openai.OpenAI
) -> None:
    handle = serve.get_deployment_handle("engine", APPLICATION)
    pids: dict[str, int] = handle.worker_pids.remote().result(timeout_s=20)
    assert len(pids) == 2
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True}

    async def kill_under_load() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as http:
            requests = [
                asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body))
                for _ in range(2)
            ]
            while not all(lane.running for lane in (await asyncio.to_thread(engine_stats)).lanes):
                assert not any(request.done() for request in requests)
            os.kill(pids["lane-0"], signal.SIGKILL)
            done, pending = await asyncio.wait(
                requests, timeout=20, return_when=asyncio.FIRST_COMPLETED
            )
            for request in pending:
                request.cancel()
            return [request.result() for request in done]

    (failed,) = asyncio.run(kill_under_load())
    assert failed.status_code == 503
    assert "lane-0" in failed.json()["error"]["message"]
    assert [lane.name for lane in engine_stats().lanes] == ["lane-1"]
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_when_every_worker_died_the_engine_comes_back(url: str, client: openai.OpenAI) -> None:
    handle = serve.get_deployment_handle("engine", APPLICATION)
    for pid in handle.worker_pids.remote().result(timeout_s=20).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(openai.InternalServerError):
            return bool(client.completions.create(model=MODEL, prompt="Once", max_tokens=2).choices)
        return False

    assert eventually(lambda: not answers())
    assert eventually(answers)
    assert len(engine_stats().lanes) == 2
