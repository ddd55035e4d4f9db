"""Engines that follow the load on a real endpoint, and one that dies: Ray Serve and HTTP."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import ray
from ray import serve

from cluster.deployment import build_application
from cluster.engine_directory import RayEngine, engine_actor, engine_names
from cluster.placement_group import list_places
from cluster.ports import free_port
from cluster.server import APPLICATION, serving
from protocol.config import (
    ApiSettings,
    AutoscalingSettings,
    CacheSettings,
    ClusterSettings,
    Configuration,
    WorkerSettings,
)
from tests.ray_cluster import eventually, live_placement_groups, local_ray

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from scheduler.stats import EngineStats

pytestmark = pytest.mark.ray

PATIENCE = 90.0
CONFIGURATION = Configuration(
    worker=WorkerSettings(
        cache=CacheSettings(num_blocks=768), device="cpu", num_slots=8, num_threads=1
    ),
    cluster=ClusterSettings(beat_interval=0.1, drain_timeout=30.0),
    api=ApiSettings(consumer_lease=4.0),
    autoscaling=AutoscalingSettings(
        enabled=True,
        max_engines=2,
        # The crowd owes some 4,000 loops and one who asks for little 16: this lies between them
        # where a full engine runs between 120 and 19,000 loops a second.
        target_debt=0.2,
        up_delay=1.0,
        down_delay=3.0,
        report_interval=0.5,
        stale_after=5.0,
        target_requests=8,
    ),
)
BODY: dict[str, Any] = {"model": "ouro-tiny", "prompt": "Once upon a time", "temperature": 0.0}
CROWD = 24
MUCH, LITTLE = 48, 4
"""Tokens that are asked for at once."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_ray():
        with serving(CONFIGURATION, "127.0.0.1", free_port()) as base:
            yield base
        assert eventually(lambda: live_placement_groups() == [])


def replicas(deployment: str = "engine") -> dict[str, int]:
    """A deployment's replicas by Serve's state, those that stop among them."""
    states = serve.status().applications[APPLICATION].deployments[deployment].replica_states
    return {str(state): count for state, count in states.items() if count}


def engine_stats(name: str) -> EngineStats:
    asked: Any = engine_actor(name).stats.remote()
    stats: EngineStats = ray.get(asked, timeout=20)
    return stats


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (other processes' state)
            await asyncio.sleep(0.1)


class Crowd:
    """Clients that ask again and again, and what they were told. Owner: one test."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self._url = http, url
        self.texts: set[tuple[int, str]] = set()
        self.answers = 0
        self.failures: list[str] = []

    @asynccontextmanager
    async def asking(self, count: int, tokens: int, pause: float) -> AsyncIterator[None]:
        """While the block runs, and then until each has its last answer."""
        leave = asyncio.Event()

        async def one() -> None:
            while not leave.is_set():
                await self.ask(tokens)
                await asyncio.sleep(pause)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())
            try:
                yield
            finally:
                leave.set()

    async def ask(self, tokens: int) -> None:
        body = BODY | {"max_tokens": tokens, "ignore_eos": True}
        try:
            answer = await self._http.post(f"{self._url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == tokens:
            self.answers += 1
            self.texts.add((tokens, answer.json()["choices"][0]["text"]))
        else:
            self.failures.append(answer.text)


def test_engines_follow_the_load_and_no_request_is_lost(url: str) -> None:
    def tokens() -> list[int]:
        return [engine_stats(name).tokens for name in engine_names(APPLICATION)]

    async def run() -> None:
        limits = httpx.Limits(max_connections=CROWD + 8)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as http:
            crowd = Crowd(http, url)
            async with crowd.asking(1, LITTLE, pause=0.3):
                async with crowd.asking(CROWD, MUCH, pause=0.0):
                    await until(lambda: replicas() == replicas("ingress") == {"RUNNING": 2})
                    # Both work: the crowd did not stay with the first.
                    await until(lambda: len(seen := tokens()) == 2 and min(seen) > MUCH)
                await until(lambda: replicas() == replicas("ingress") == {"RUNNING": 1})
            await crowd.ask(MUCH)
            assert crowd.failures == []
            assert {tokens for tokens, _ in crowd.texts} == {MUCH, LITTLE}
            assert len(crowd.texts) == 2
            assert crowd.answers > CROWD
            assert len(list_places()) == len(engine_names(APPLICATION)) == 1

    assert eventually(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 200)
    assert replicas() == {"RUNNING": 1}
    asyncio.run(run())


def test_engines_that_are_replaced_finish_what_they_have(url: str) -> None:
    changed = CONFIGURATION.model_copy(update={"api": ApiSettings(consumer_lease=5.0)})

    async def run() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            crowd = Crowd(http, url)
            async with crowd.asking(1, LITTLE, pause=0.1), crowd.asking(CROWD, MUCH, pause=0.0):
                # One is replaced at a time: of two, one takes requests meanwhile.
                await until(lambda: replicas() == {"RUNNING": 2})
                before = set(engine_names(APPLICATION))
                assert len(before) == 2
                application = build_application(changed)
                await asyncio.to_thread(serve.run, application, False, APPLICATION, "/")
                await until(lambda: before.isdisjoint(engine_names(APPLICATION)))
            assert crowd.failures == []
            assert len(crowd.texts) == 2

    asyncio.run(run())
    assert eventually(lambda: len(list_places()) == len(engine_names(APPLICATION)) == 1)


def test_a_lost_engine_ends_its_requests_and_another_takes_its_place(url: str) -> None:
    (name,) = engine_names(APPLICATION)
    (place,) = list_places()
    assert place.engine == name

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            body = BODY | {"max_tokens": 1500, "ignore_eos": True}
            asked = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body))
            engine = RayEngine(engine_actor(name))
            while not (await engine.stats()).running:
                assert not asked.done()
            ray.kill(engine_actor(name))
            return await asked

    lost = asyncio.run(run())
    assert lost.status_code == 503
    assert "the engine is gone" in lost.json()["error"]["message"]

    def back() -> bool:
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 2}, timeout=20)
        return answer.status_code == 200

    assert eventually(back)
    assert engine_names(APPLICATION) != [name]
    # What the dead one could not give back was given back for it.
    assert eventually(lambda: [other.engine for other in list_places()] == engine_names())
