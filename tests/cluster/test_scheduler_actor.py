"""SchedulerActor and EngineClient on one loop, over the real engine and a local worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cluster.engine_client import EngineClient
from cluster.engine_link import EngineLink
from cluster.output_stream import OutputStream
from cluster.scheduler_actor import Refusal, SchedulerActor
from protocol.config import (
    ApiSettings,
    CacheSettings,
    Configuration,
    SchedulerSettings,
    WorkerSettings,
)
from protocol.errors import (
    CapacityError,
    ExecutorClosedError,
    LoopmeshError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.result import TokenLogprobs
from protocol.sampling import SamplingParams
from scheduler.output import RequestOutput
from tests.cluster.engines import Directory
from tests.plans import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from cluster.engine_load import EngineLoad
    from scheduler.stats import EngineStats

CONFIGURATION = Configuration(
    worker=WorkerSettings(
        cache=CacheSettings(num_blocks=512), device="cpu", num_slots=4, num_threads=1
    ),
    scheduler=SchedulerSettings(max_waiting=8),
    api=ApiSettings(consumer_lease=0.4),
)
PROMPT = [1648, 1424, 261, 658]
LONG = SamplingParams(max_tokens=1900, ignore_eos=True, seed=1)
HALF = SamplingParams(max_tokens=900, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)


@asynccontextmanager
async def engine() -> AsyncIterator[SchedulerActor]:
    actor = SchedulerActor(CONFIGURATION, executor="local")
    async with asyncio.timeout(TIMEOUT):
        await actor.open()
        try:
            yield actor
        finally:
            await actor.close()
            await actor.close()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[SchedulerActor, EngineClient]]:
    async with engine() as actor:
        client = EngineClient(Directory(only=actor), CONFIGURATION.api.consumer_lease)
        client.start()
        try:
            yield actor, client
        finally:
            await client.close()


async def until(holds: Callable[[EngineStats], bool], actor: SchedulerActor) -> None:
    while not holds(await actor.stats()):  # noqa: ASYNC110 (the engine has no event for it)
        await asyncio.sleep(0)


def at_rest(stats: EngineStats) -> bool:
    busy = stats.waiting + stats.running + stats.releasing + stats.rng_keys
    return busy == 0 and stats.free_blocks == stats.total_blocks


async def collect(client: EngineClient, params: SamplingParams) -> list[RequestOutput]:
    async with aclosing(client.generate(PROMPT, params)) as outputs:
        return [output async for output in outputs]


def test_a_request_comes_back_in_order_and_leaves_nothing() -> None:
    async def run() -> None:
        async with served() as (actor, client):
            outputs = await collect(client, SHORT)
            assert [output.start_index for output in outputs] == [
                sum(len(o.tokens) for o in outputs[:index]) for index in range(len(outputs))
            ]
            assert sum(len(output.tokens) for output in outputs) == 6
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert client.serving == ()
            await until(at_rest, actor)
            await actor.check_health()

    asyncio.run(run())


def test_requests_at_once_give_what_each_gives_alone() -> None:
    def tokens(outputs: list[RequestOutput]) -> list[int]:
        return [token for output in outputs for token in output.tokens]

    async def run() -> None:
        async with served() as (_, client):
            alone = tokens(await collect(client, SHORT))
            together = await asyncio.gather(*(collect(client, SHORT) for _ in range(6)))
            assert [tokens(outputs) for outputs in together] == [alone] * 6

    asyncio.run(run())


def test_prompts_of_one_tenant_share_what_they_start_with() -> None:
    prompt = PROMPT * 9

    async def run() -> None:
        async with served() as (actor, client):
            hits = []
            for tenant in ("red", "red", "blue"):
                async with aclosing(client.generate(prompt, SHORT, tenant=tenant)) as outputs:
                    assert [output async for output in outputs]
                await until(at_rest, actor)
                hits.append((await actor.stats()).prefix_hit_tokens)
            assert hits == [0, 32, 32]

    asyncio.run(run())


def test_closing_a_generation_early_aborts_it() -> None:
    async def run() -> None:
        async with served() as (actor, client):
            async with aclosing(client.generate(PROMPT, LONG)) as outputs:
                await anext(outputs)
            await until(at_rest, actor)
            assert (await actor.stats()).finished[FinishReason.ABORT] == 1

    asyncio.run(run())


def test_a_request_is_finished_after_one_of_its_outputs() -> None:
    async def run() -> None:
        async with served() as (actor, client):
            async with aclosing(client.generate(PROMPT, LONG)) as outputs:
                request_id = (await anext(outputs)).key.request_id
                await client.finish(request_id, 0)
                await client.finish(request_id, 0)
                rest = [output async for output in outputs]
            assert (rest[-1].finish_reason, rest[-1].tokens) == (FinishReason.STOP, ())
            await client.finish("nobody", 0)
            await until(at_rest, actor)
            finished = (await actor.stats()).finished
            assert finished == {FinishReason.STOP: 1}

    asyncio.run(run())


def test_a_finish_that_gets_lost_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with engine() as actor:
            cut_off = EngineLink("a", _NeverFinished(actor), "ingress", 1.0, lambda: None)
            await cut_off.finish("a", 0)
            await cut_off.close("the test ends")

    asyncio.run(run())
    assert "the end of a got lost" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "params", "error", "named"),
    [
        ([], SHORT, RequestError, "prompt"),
        ([9999], SHORT, RequestError, "9999"),
        (PROMPT, SamplingParams(max_tokens=3000), RequestError, "2048"),
        (PROMPT, SamplingParams(max_loops=5), RequestError, "max_loops"),
    ],
)
def test_a_refusal_arrives_as_its_own_error(
    prompt: list[int], params: SamplingParams, error: type[LoopmeshError], named: str
) -> None:
    async def run() -> None:
        async with served() as (actor, client):
            with pytest.raises(error, match=named):
                await anext(client.generate(prompt, params))
            assert client.serving == ()
            assert at_rest(await actor.stats())

    asyncio.run(run())


def test_a_full_queue_turns_requests_away() -> None:
    async def run() -> None:
        async with served() as (_, client):
            everyone = [asyncio.ensure_future(collect(client, LONG)) for _ in range(16)]
            done, _ = await asyncio.wait(everyone, return_when=asyncio.FIRST_COMPLETED)
            assert all(isinstance(task.exception(), OverloadedError) for task in done)
            for task in everyone:
                task.cancel()
            await asyncio.gather(*everyone, return_exceptions=True)

    asyncio.run(run())


def test_requests_of_an_ingress_that_went_silent_are_aborted() -> None:
    async def run() -> None:
        async with engine() as actor:
            async with aclosing(actor.outputs("ingress-1")) as frames:
                assert await anext(frames) == []
                assert await actor.submit("ingress-1", "r1", PROMPT, LONG, 1) is None
                await until(at_rest, actor)
            assert (await actor.stats()).finished[FinishReason.ABORT] == 1
            refused = await actor.submit("ingress-1", "r2", PROMPT, LONG, 1)
            assert isinstance(refused, Refusal)
            assert isinstance(refused.error(), WorkerLostError)

    asyncio.run(run())


def test_a_renewal_aborts_what_the_ingress_no_longer_serves() -> None:
    async def run() -> None:
        async with engine() as actor, aclosing(actor.outputs("ingress-1")) as frames:
            await anext(frames)
            for request_id in ("kept", "lost"):
                await actor.submit("ingress-1", request_id, PROMPT, HALF, 1)
            await until(lambda stats: stats.running == 2, actor)
            while (await actor.stats()).running == 2:
                await actor.renew("ingress-1", ["kept"])
            assert (await actor.stats()).finished[FinishReason.ABORT] == 1
            ended = [o.key.request_id for o in await anext(frames) if o.finish_reason]
            assert ended == ["lost"]

    asyncio.run(run())


def test_an_engine_that_closes_ends_its_requests_with_an_error() -> None:
    async def run() -> None:
        async with served() as (actor, client):
            outputs = client.generate(PROMPT, LONG)
            await anext(outputs)
            await actor.close()
            with pytest.raises(WorkerLostError):
                await actor.check_health()
            last = [output async for output in outputs][-1]
            assert last.finish_reason is FinishReason.ERROR

    asyncio.run(run())


def test_a_stream_that_is_closed_aborts_what_it_served_at_once() -> None:
    async def run() -> None:
        async with engine() as actor:
            async with aclosing(actor.outputs("ingress-1")) as frames:
                await anext(frames)
                assert await actor.submit("ingress-1", "r1", PROMPT, LONG, 1) is None
            # The lease has not run out yet.
            assert (await actor.stats()).finished[FinishReason.ABORT] == 1
            await until(at_rest, actor)

    asyncio.run(run())


def test_a_stream_opened_anew_aborts_what_the_last_one_served() -> None:
    async def run() -> None:
        async with engine() as actor, aclosing(actor.outputs("ingress-1")) as old:
            await anext(old)
            await actor.submit("ingress-1", "r1", PROMPT, LONG, 1)
            async with aclosing(actor.outputs("ingress-1")) as new:
                await anext(new)
                await until(at_rest, actor)
                assert (await actor.stats()).finished[FinishReason.ABORT] == 1
                left = [output async for frame in old for output in frame]
                assert left[-1].finish_reason is FinishReason.ABORT

    asyncio.run(run())


def test_an_ingress_whose_lease_ran_out_finds_its_way_back() -> None:
    async def run() -> None:
        async with served() as (actor, client):
            await collect(client, SHORT)
            # The client holds the only stream; a name that lapses is what a lost renewal leads to.
            lapsed = EngineClient(
                Directory(only=_NeverRenewed(actor)), CONFIGURATION.api.consumer_lease
            )
            lapsed.start()
            try:
                assert len(await collect(lapsed, SHORT)) >= 1
                await asyncio.sleep(2 * CONFIGURATION.api.consumer_lease)
                while True:
                    with contextlib.suppress(WorkerLostError):
                        assert len(await collect(lapsed, SHORT)) >= 1
                        return
            finally:
                await lapsed.close()

    asyncio.run(run())


class _NeverRenewed:
    """A SchedulerActor whose renewals all get lost on the way."""

    def __init__(self, actor: SchedulerActor) -> None:
        self.model, self.stats = actor.model, actor.stats
        self.submit, self.abort, self.outputs = actor.submit, actor.abort, actor.outputs
        self.finish = actor.finish

    async def renew(self, consumer: str, serving: Collection[str]) -> EngineLoad:
        raise ConnectionError(f"{consumer} with {len(serving)} requests is cut off")


class _NeverFinished:
    """A SchedulerActor that cannot be told to finish a request."""

    def __init__(self, actor: SchedulerActor) -> None:
        self.model, self.stats, self.renew = actor.model, actor.stats, actor.renew
        self.submit, self.abort, self.outputs = actor.submit, actor.abort, actor.outputs

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        assert choice == 0
        raise ConnectionError(f"{request_id} after {at_output_index} is cut off")


def test_streams_end_with_the_engine() -> None:
    async def run() -> None:
        async with engine() as actor, aclosing(actor.outputs("ingress-1")) as frames:
            await anext(frames)
            await actor.close()
            assert [frame async for frame in frames] == []
            with pytest.raises(WorkerLostError):
                await anext(actor.outputs("ingress-2"))

    asyncio.run(run())


def test_an_engine_closed_while_it_starts_leaves_no_worker() -> None:
    async def run() -> None:
        actor = SchedulerActor(CONFIGURATION, executor="local")
        opening = asyncio.ensure_future(actor.open())
        await asyncio.sleep(0)
        await actor.close()
        with pytest.raises(ExecutorClosedError, match="while it started"):
            await opening

    before = device_threads()
    asyncio.run(run())
    assert device_threads() == before


def device_threads() -> int:
    return sum(thread.name == "loopmesh-device" for thread in threading.enumerate())


def test_waiting_outputs_of_one_request_are_merged() -> None:
    key, other = RequestKey("a", 1), RequestKey("b", 2)

    async def run() -> None:
        stream = OutputStream()
        stream.put(RequestOutput(key, 0, (5, 6), (4, 2), None, None))
        stream.put(RequestOutput(other, 0, (1,), (4,), None, None))
        stream.put(RequestOutput(key, 2, (7,), (1,), FinishReason.STOP, None))
        assert await stream.take() == [
            RequestOutput(key, 0, (5, 6, 7), (4, 2, 1), FinishReason.STOP, None),
            RequestOutput(other, 0, (1,), (4,), None, None),
        ]
        told = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
        for index, entry in enumerate(told):
            stream.put(RequestOutput(key, index, (5,), (4,), None, None, logprobs=(entry,)))
        assert [output.logprobs for output in await stream.take()] == [told]
        # An end that cuts off what waits, and one that cuts off what was taken already.
        stream.put(
            RequestOutput(key, 2, (5, 6, 7), (4, 2, 1), None, None, logprobs=(*told, told[0]))
        )
        stream.put(RequestOutput(other, 1, (2,), (4,), None, None))
        stream.put(RequestOutput(key, 3, (), (), FinishReason.STOP, None))
        stream.put(RequestOutput(other, 0, (), (), FinishReason.STOP, None))
        assert await stream.take() == [
            RequestOutput(key, 2, (5,), (4,), FinishReason.STOP, None, logprobs=told[:1]),
            RequestOutput(other, 0, (), (), FinishReason.STOP, None),
        ]
        assert len(stream) == 0
        stream.put(RequestOutput(other, 1, (2,), (4,), FinishReason.STOP, None))
        stream.end()
        assert [output.key for output in await stream.take()] == [other]
        assert await stream.take() == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("CapacityError", CapacityError), ("Nonsense", LoopmeshError), ("annotations", LoopmeshError)],
)
def test_a_refusal_names_only_our_own_errors(kind: str, expected: type[LoopmeshError]) -> None:
    error = Refusal(kind, "why").error()
    assert type(error) is expected
    assert str(error) == "why"
