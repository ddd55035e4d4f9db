"""An ingress's side of several engines: who takes a request, and what if that one goes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cluster.engine_client import EngineClient
from cluster.scheduler_actor import Refusal, SchedulerActor
from protocol.config import CacheSettings, Configuration, WorkerSettings
from protocol.errors import DrainingError, OverloadedError, WorkerLostError
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from tests.cluster.engines import IDLE, MODEL, Directory, PlayedEngine
from tests.plans import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from scheduler.output import RequestOutput

LEASE = 0.08
PROMPT = [5, 6]
PARAMS = SamplingParams(max_tokens=8, seed=3)


@asynccontextmanager
async def client_of(directory: Directory) -> AsyncIterator[EngineClient]:
    client = EngineClient(directory, LEASE)
    async with asyncio.timeout(TIMEOUT):
        client.start()
        try:
            yield client
        finally:
            await client.close()
            await client.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 (links have no event for it)
        await asyncio.sleep(0.001)


def ready(client: EngineClient, count: int) -> Callable[[], bool]:
    """Whether that many engines have said how busy they are."""
    return lambda: (
        sum(link.takes_requests and link.load is not None for link in client.links) == (count)
    )


async def ask(client: EngineClient) -> list[RequestOutput]:
    async with aclosing(client.generate(PROMPT, PARAMS)) as outputs:
        return [output async for output in outputs]


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(work)


def test_a_request_goes_to_the_least_loaded_engine_and_its_calls_follow_it() -> None:
    async def work() -> None:
        busy = PlayedEngine(replace(IDLE, debt=100_000))
        idle = PlayedEngine()
        async with client_of(Directory(busy=busy, idle=idle)) as client:
            await until(ready(client, 2))
            async with aclosing(client.generate(PROMPT, PARAMS, tenant="t")) as outputs:
                first = asyncio.ensure_future(anext(outputs))
                await idle.submitted.wait()
                (request,) = idle.taken
                assert client.serving == (request,)
                idle.say(request, 7)
                assert (await first).tokens == (7,)
                await client.finish(request, 0)
                await client.finish("unknown", 0)
            await until(lambda: ("abort", request) in idle.calls)
            assert [call for call in idle.calls if call[0] == "finish"] == [
                ("finish", f"{request} 0 0")
            ]
            assert "3t[5, 6]8" in {call[1] for call in idle.calls}
            assert {call[0] for call in busy.calls} == {"renew", "outputs"}

    run(work())


def test_requests_that_no_report_knows_yet_count() -> None:
    async def work() -> None:
        engines = PlayedEngine(), PlayedEngine(replace(IDLE, debt=1))
        async with client_of(Directory(one=engines[0], two=engines[1])) as client:
            await until(ready(client, 2))
            asked = [asyncio.ensure_future(ask(client)) for _ in range(2)]
            for engine in engines:
                await engine.submitted.wait()
                engine.say(engine.taken[0], 7, FinishReason.STOP)
            assert all(await asyncio.gather(*asked))

    run(work())


def test_an_engine_that_drains_gets_no_new_request_and_keeps_what_it_has() -> None:
    async def work() -> None:
        old, new = PlayedEngine(), PlayedEngine(replace(IDLE, debt=10**6))
        directory = Directory(old=old)
        async with client_of(directory) as client:
            await until(ready(client, 1))
            early = asyncio.ensure_future(ask(client))
            await old.submitted.wait()
            directory.listed["new"] = new
            await until(ready(client, 2))
            old.load = replace(IDLE, draining=True)
            await until(ready(client, 1))
            late = asyncio.ensure_future(ask(client))
            await new.submitted.wait()
            assert len(old.taken) == 1
            old.say(old.taken[0], 7, FinishReason.STOP)
            new.say(new.taken[0], 8, FinishReason.STOP)
            assert [(await early)[-1].tokens, (await late)[-1].tokens] == [(7,), (8,)]
            # It leaves the list while its stream still stands, and goes with the stream.
            del directory.listed["old"]
            renewals = len(old.calls)
            await until(lambda: len(old.calls) > renewals)
            old.cut()
            await until(lambda: [link.name for link in client.links] == ["new"])
            assert "new attached, 0 requests" in repr(client.links[0])

    run(work())


def test_one_that_takes_no_more_is_passed_by() -> None:
    async def work() -> None:
        closing = PlayedEngine(refuses=Refusal("DrainingError", "the engine is shutting down"))
        other = PlayedEngine(replace(IDLE, debt=10**6))
        directory = Directory(closing=closing)
        async with client_of(directory) as client:
            await until(ready(client, 1))
            asked = asyncio.ensure_future(ask(client))
            await closing.submitted.wait()
            # The one in its place is not known yet.
            directory.listed["other"] = other
            await other.submitted.wait()
            other.say(other.taken[0], 7, FinishReason.STOP)
            assert len(await asked) == 1
            await until(ready(client, 2))
            # Any other refusal is an answer.
            closing.refuses = Refusal("OverloadedError", "too many")
            with pytest.raises(OverloadedError, match="too many"):
                await ask(client)

    run(work())


def test_a_request_whose_engine_is_lost_before_its_first_output_goes_to_another() -> None:
    async def work() -> None:
        dying, other = PlayedEngine(), PlayedEngine(replace(IDLE, debt=10**6))
        async with client_of(Directory(dying=dying, other=other)) as client:
            await until(ready(client, 2))
            asked = asyncio.ensure_future(ask(client))
            await dying.submitted.wait()
            dying.cut()
            await other.submitted.wait()
            other.say(other.taken[0], 7, FinishReason.STOP)
            assert [output.tokens for output in await asked] == [(7,)]

    run(work())


@pytest.mark.parametrize("delivered", [True, False])
def test_one_that_cannot_go_elsewhere_ends_with_the_reason(delivered: bool) -> None:
    async def work() -> None:
        dying, other = PlayedEngine(), PlayedEngine(replace(IDLE, debt=10**6))
        engines = {"dying": dying, "other": other} if delivered else {"dying": dying}
        async with client_of(Directory(**engines)) as client:
            await until(ready(client, len(engines)))
            asked = asyncio.ensure_future(ask(client))
            await dying.submitted.wait()
            if delivered:
                dying.say(dying.taken[0], 7)
            dying.cut()
            with pytest.raises(WorkerLostError, match=r"its output stream ended.*send it again"):
                await asked
            assert other.taken == []

    run(work())


def test_a_request_is_not_sent_to_every_engine_that_it_may_have_killed() -> None:
    async def work() -> None:
        engines = {f"e{i}": PlayedEngine(replace(IDLE, debt=10**6 * i)) for i in range(4)}
        async with client_of(Directory(**engines)) as client:
            await until(ready(client, 4))
            asked = asyncio.ensure_future(ask(client))
            for engine in list(engines.values())[:3]:
                await engine.submitted.wait()
                engine.cut()
            with pytest.raises(WorkerLostError):
                await asked
            assert [len(engine.taken) for engine in engines.values()] == [1, 1, 1, 0]

    run(work())


def test_what_keeps_requests_from_running_is_told() -> None:
    async def work() -> None:
        directory = Directory()
        async with client_of(directory) as client:
            assert client.trouble() == "no engine is ready; try again"
            with pytest.raises(WorkerLostError, match="no engine is ready"):
                await client.model(0.01)
            engine = directory.listed["only"] = PlayedEngine(replace(IDLE, workers=0))
            assert await client.model(TIMEOUT) == MODEL
            await until(ready(client, 1))
            assert client.trouble() == "no worker is left"
            engine.load = IDLE
            await until(lambda: client.trouble() is None)

    run(work())


def test_two_real_engines_share_the_work_and_one_drains_without_a_loss() -> None:
    configuration = Configuration(
        worker=WorkerSettings(
            cache=CacheSettings(num_blocks=512), device="cpu", num_slots=4, num_threads=1
        )
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)

    async def ask_for_text(client: EngineClient) -> list[int]:
        async with aclosing(client.generate([1648, 1424, 261, 658], params)) as outputs:
            return [token async for output in outputs for token in output.tokens]

    async def work() -> None:
        actors = [SchedulerActor(configuration, executor="local") for _ in range(2)]
        try:
            for actor in actors:
                await actor.open()
            async with client_of(Directory(a=actors[0], b=actors[1])) as client:
                await until(ready(client, 2))
                asked = [asyncio.ensure_future(ask_for_text(client)) for _ in range(8)]
                await until(lambda: len(client.serving) == 8)
                assert [len(link.serving) for link in client.links] == [4, 4]
                await actors[0].drain(TIMEOUT)
                late = asyncio.ensure_future(ask_for_text(client))
                answers = [*await asyncio.gather(*asked), await late]
                assert answers == [answers[0]] * 9
                assert len(answers[0]) == 24
                done = [(await actor.stats()).finished[FinishReason.LENGTH] for actor in actors]
                assert done == [4, 5]
                refused = await actors[0].submit("x", "y", PROMPT, params, 1)
                assert refused is not None
                assert isinstance(refused.error(), DrainingError)
                assert (await actors[0].load()).draining
                rate = (await actors[1].load()).loops_per_second
                assert rate is None or rate > 0
        finally:
            for actor in actors:
                await actor.close()

    run(work())
