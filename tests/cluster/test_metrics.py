from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from cluster import request_metrics
from cluster.metrics import DeliveryRate, start_reports
from cluster.request_metrics import CountResponses, RequestMetrics, rejection
from protocol.config import SchedulerSettings
from protocol.errors import (
    CapacityError,
    DeadlineError,
    LoopmeshError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from scheduler.engine import Engine
from scheduler.output import RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from cluster.metric_table import Metric
    from scheduler.stats import EngineStats


def test_the_worked_example_of_a_rate() -> None:
    rate = DeliveryRate()
    rate.note(10, 30, 0.0)
    assert (rate.loops_per_second, rate.mean_exit_depth) == (None, None)
    rate.note(30, 70, 2.0)
    assert (rate.loops_per_second, rate.mean_exit_depth) == (20.0, 2.0)


def test_an_idle_time_changes_no_rate_and_is_no_part_of_the_next() -> None:
    rate = DeliveryRate()
    for tokens, loops, now in ((0, 0, 0.0), (10, 40, 1.0), (10, 40, 9.0), (20, 60, 10.0)):
        rate.note(tokens, loops, now)
    assert (rate.loops_per_second, rate.mean_exit_depth) == (30.0, 3.0)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OverloadedError("x"), "queue_full"),
        (CapacityError("x"), "too_large"),
        (RequestError("x"), "invalid"),
        (WorkerLostError("x"), "unavailable"),
        (DeadlineError("x"), "unavailable"),
    ],
)
def test_a_rejection_has_one_of_four_words(error: LoopmeshError, word: str) -> None:
    assert rejection(error) == word


def test_reports_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(SchedulerSettings())

    class Asked:
        async def stats(self) -> EngineStats:
            return engine.stats()

    async def scene() -> list[float]:
        times: list[float] = []
        twice = asyncio.Event()

        def update(stats: EngineStats, now: float) -> None:
            assert stats.tokens == 0
            times.append(now)
            if len(times) == 1:
                raise ValueError("the first one fails")
            twice.set()

        reports = start_reports(Asked(), update, 0.001)
        await asyncio.wait_for(twice.wait(), 20)
        reports.cancel()
        return times

    first, second, *_ = asyncio.run(scene())
    assert first < second
    assert "the first one fails" in caplog.text


class Told:
    """Metrics whose instruments write down what they are told, in place of Ray's."""

    def __init__(self, metric: Metric, _: str) -> None:
        self.name = metric.name.removeprefix("loopmesh_")

    def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
        EVENTS.append((self.name, value, *(tags or {}).values()))

    def observe(self, value: float) -> None:
        EVENTS.append((self.name, value))


EVENTS: list[tuple[object, ...]] = []


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestMetrics]:
    ticks = iter(range(100))
    monkeypatch.setattr(request_metrics, "counter", Told)
    monkeypatch.setattr(request_metrics, "histogram", Told)
    yield RequestMetrics("tiny", lambda: float(next(ticks)))
    EVENTS.clear()


def output(
    start: int, tokens: int, end: FinishReason | None = None, choice: int = 0
) -> RequestOutput:
    ids = (5,) * tokens
    error = "broken" if end is FinishReason.ERROR else None
    return RequestOutput(RequestKey("r", 1 + choice), start, ids, ids, end, error, choice=choice)


async def played(
    outputs: Sequence[RequestOutput], error: LoopmeshError | None = None
) -> AsyncGenerator[RequestOutput, None]:
    for item in outputs:
        yield item
    if error is not None:
        raise error


async def seen(
    metrics: RequestMetrics, generation: AsyncGenerator[RequestOutput, None], choices: int = 1
) -> int:
    count = 0
    async with aclosing(metrics.observed(generation, 7, choices)) as outputs:
        async for _ in outputs:
            count += 1
    return count


def test_a_request_is_timed_from_its_start_to_its_end(metrics: RequestMetrics) -> None:
    """The clock moves a second with each look at it."""
    pieces = (output(0, 1), output(1, 3), output(4, 2, FinishReason.LENGTH))
    assert asyncio.run(seen(metrics, played(pieces))) == 3
    assert EVENTS == [
        ("prompt_tokens", 7),
        ("time_to_first_token_seconds", 1.0),
        ("inter_token_latency_seconds", 1.0),
        ("inter_token_latency_seconds", 1.0),
        ("request_time_per_output_token_seconds", 2 / 5),
        ("e2e_request_latency_seconds", 4.0),
    ]


def test_choices_have_times_of_their_own_and_one_first_token(metrics: RequestMetrics) -> None:
    stop = FinishReason.STOP
    pieces = (output(0, 1), output(0, 1, choice=1), output(1, 1, stop), output(1, 1, stop, 1))
    asyncio.run(seen(metrics, played(pieces), 2))
    assert [name for name, *_ in EVENTS].count("time_to_first_token_seconds") == 1
    assert [value for name, value in EVENTS if name == "inter_token_latency_seconds"] == [2.0, 2.0]
    assert EVENTS[-1] == ("e2e_request_latency_seconds", 5.0)


@pytest.mark.parametrize("late_word", [False, True])
def test_a_text_that_is_complete_ends_its_request(metrics: RequestMetrics, late_word: bool) -> None:
    """Whether the engine's own word of the end is waited for or not."""

    async def scene() -> None:
        pieces = [output(0, 1), output(1, 1), output(1, 0, FinishReason.STOP)]
        async with aclosing(metrics.observed(played(pieces), 7, 1)) as outputs:
            await anext(outputs)
            await anext(outputs)
            metrics.finished("r", 0)
            if late_word:
                await anext(outputs)

    asyncio.run(scene())
    names = [name for name, *_ in EVENTS]
    assert names.count("request_time_per_output_token_seconds") == 1
    assert names.count("e2e_request_latency_seconds") == 1
    metrics.finished("r", 0)
    assert len(EVENTS) == len(names)


@pytest.mark.parametrize("end", [FinishReason.ERROR, FinishReason.ABORT, None])
def test_a_request_that_failed_or_was_left_has_no_time_as_a_whole(
    metrics: RequestMetrics, end: FinishReason | None
) -> None:
    asyncio.run(seen(metrics, played((output(0, 1), output(1, 1, end)))))
    assert "e2e_request_latency_seconds" not in {name for name, *_ in EVENTS}


def test_who_is_not_taken_is_counted_by_reason_and_nothing_else(metrics: RequestMetrics) -> None:
    with pytest.raises(OverloadedError):
        asyncio.run(seen(metrics, played((), OverloadedError("full"))))
    assert EVENTS == [("admission_rejections", 1, "queue_full")]


def test_a_worker_lost_on_the_way_is_no_rejection(metrics: RequestMetrics) -> None:
    with pytest.raises(WorkerLostError):
        asyncio.run(seen(metrics, played((output(0, 1),), WorkerLostError("gone"))))
    assert [name for name, *_ in EVENTS] == ["prompt_tokens", "time_to_first_token_seconds"]


def test_paths_that_clients_invent_are_one_route(metrics: RequestMetrics) -> None:
    async def application(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def scene() -> None:
        app = CountResponses(application, metrics, ["/health"])
        for path in ("/health", "/a", "/b"):
            await app({"type": "http", "path": path}, receive, send)

    asyncio.run(scene())
    assert len(sent) == 6
    assert EVENTS == [
        ("http_requests", 1, "/health", "200"),
        ("http_requests", 1, "other", "200"),
        ("http_requests", 1, "other", "200"),
    ]
