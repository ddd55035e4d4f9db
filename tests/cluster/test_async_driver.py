"""The asynchronous driver over scripted executors: it delivers, ends, and shows its mistakes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cluster.drivers import AsyncDriver
from protocol.errors import WorkerLostError
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from tests.cluster.driving import (
    CONTEXT,
    LIMIT,
    Recorder,
    Refusing,
    bare_engine,
    executors,
)
from tests.scheduler.bench import make_profile, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.executor import Submission
    from protocol.plan import ExecutionPlan
    from scheduler.output import RequestOutput


def drive(
    body: Callable[[AsyncDriver, Recorder], Any],
    workers: dict[str, Any],
    plan_timeout: float = LIMIT,
) -> Recorder:
    """Run `body` beside a started AsyncDriver over `workers`, then close the driver twice."""

    async def run() -> Recorder:
        recorder = Recorder()
        CONTEXT.set("of the caller")
        driver = AsyncDriver(bare_engine(), workers, plan_timeout, recorder.deliver)
        driver.start()
        await body(driver, recorder)
        await driver.close(LIMIT)
        await driver.close(LIMIT)
        return recorder

    return asyncio.run(run())


def test_the_pump_has_a_context_of_its_own() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(max_tokens=2), 7)
        await recorder.until_ended("a")

    assert set(drive(body, executors()).contexts) == {"own"}


def test_progress_counts_from_the_start_of_the_work_or_its_last_result() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        idle = driver.progress
        assert not idle.outstanding
        driver.add("a", [1], SamplingParams(max_tokens=2), 7)
        started = driver.progress
        assert (started.outstanding, started.last_result > idle.last_result) == (True, True)
        await recorder.until_ended("a")
        ended = driver.progress
        assert ended.last_result > started.last_result
        driver.add("b", [1], SamplingParams(max_tokens=2), 7)
        assert driver.progress.last_result >= ended.last_result
        await recorder.until_ended("b")

    drive(body, executors())


def test_an_async_abort_is_delivered_at_once() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(max_tokens=2), 7)
        driver.abort("a")
        driver.abort("nobody")
        assert reasons(recorder.outputs) == {"a": FinishReason.ABORT}

    drive(body, executors())


def test_an_async_finish_is_delivered_at_once() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(max_tokens=40), 7)
        driver.add("b", [1], SamplingParams(max_tokens=4), 7)
        await recorder.until_ended("b")
        driver.finish("a", 1)
        end = recorder.outputs[-1]
        assert (end.key.request_id, end.start_index, end.tokens) == ("a", 2, ())
        assert end.finish_reason is FinishReason.STOP
        driver.finish("a", 1)
        driver.finish("nobody", 0)
        assert recorder.outputs[-1] is end

    drive(body, executors())


def test_an_async_lost_worker_costs_its_lane_alone() -> None:
    held = ScriptedExecutor(make_profile(), manual=True)

    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        for request_id in "ab":
            driver.add(request_id, [1], SamplingParams(max_tokens=4), 7)
        await recorder.until_ended("b")
        assert driver.progress.outstanding
        held.lose("the process died")
        await recorder.until_ended("a")
        assert not driver.progress.outstanding
        driver.add("c", [1], SamplingParams(max_tokens=4), 7)
        await recorder.until_ended("c")

    recorder = drive(body, {"lane-0": held, "lane-1": executors()["lane-0"]})
    assert reasons(recorder.outputs) == {
        "a": FinishReason.ERROR,
        "b": FinishReason.LENGTH,
        "c": FinishReason.LENGTH,
    }


def test_an_idle_lost_lane_is_noticed() -> None:
    workers = executors()

    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        workers["lane-0"].lose("gone")
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    driver.add("a", [1], SamplingParams(max_tokens=1), 7)
                except WorkerLostError:
                    return
                await recorder.until_ended("a")
                recorder.outputs.clear()

    drive(body, workers)


def test_an_async_plan_without_an_answer_costs_its_lane() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(), 7)
        await recorder.until_ended("a")

    recorder = drive(body, executors(manual=True), plan_timeout=0.01)
    assert recorder.outputs[0].error == "lane-0 was closed: no answer to plan 1 within 0.01 s"


def test_closing_ends_live_requests() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(), 7)

    recorder = drive(body, executors(manual=True))
    assert reasons(recorder.outputs) == {"a": FinishReason.ERROR}


def test_closing_before_the_start() -> None:
    async def run() -> None:
        driver = AsyncDriver(bare_engine(), executors(), LIMIT, Recorder().deliver)
        await driver.close(LIMIT)

    asyncio.run(run())


def test_a_mistake_in_the_pump_ends_every_request_and_shows() -> None:
    broken = Refusing(make_profile())
    broken.error = RuntimeError("a bug")
    held = ScriptedExecutor(make_profile(), manual=True)

    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        assert driver.progress.error is None
        for request_id in "ab":
            driver.add(request_id, [1], SamplingParams(), 7)
        await recorder.until_ended("a", "b")
        assert driver.progress.error == "the driver failed: RuntimeError: a bug"
        with pytest.raises(WorkerLostError):
            driver.add("c", [1], SamplingParams(), 7)

    recorder = drive(body, {"lane-0": broken, "lane-1": held})
    assert set(reasons(recorder.outputs).values()) == {FinishReason.ERROR}


def pump() -> asyncio.Task[Any]:
    """The task of the driver that runs now."""
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "loopmesh-driver")
    return task


def test_a_cancelled_pump_ends_every_request_and_shows() -> None:
    async def body(driver: AsyncDriver, recorder: Recorder) -> None:
        driver.add("a", [1], SamplingParams(max_tokens=1), 7)
        await recorder.until_ended("a")
        driver.add("b", [1], SamplingParams(max_tokens=1), 7)
        pump().cancel()
        await recorder.until_ended("b")
        assert driver.progress.error == "the driver's task was cancelled"

    assert reasons(drive(body, executors()).outputs)["b"] is FinishReason.ERROR


def test_a_deliverer_that_fails_does_not_keep_lanes_open() -> None:
    calls: list[int] = []

    def deliver(outputs: list[RequestOutput]) -> None:
        calls.append(len(outputs))
        raise RuntimeError("no reader")

    async def run() -> None:
        driver = AsyncDriver(bare_engine(), executors(2), LIMIT, deliver)
        driver.start()
        for request_id in "ab":
            driver.add(request_id, [1], SamplingParams(max_tokens=2), 7)
        await asyncio.wait((pump(),), timeout=LIMIT)
        assert driver.progress.error == "the driver failed: RuntimeError: no reader"
        assert not driver.progress.outstanding
        await driver.close(LIMIT)

    asyncio.run(run())
    assert len(calls) == 3  # a token, then the end of each request


class Announcing(ScriptedExecutor):
    """Says when it has taken a plan. Owner: one test. Mutated only by: its methods."""

    def __init__(self) -> None:
        super().__init__(make_profile(), manual=True)
        self.taken = asyncio.Event()

    def submit(self, plan: ExecutionPlan) -> Submission:
        self.taken.set()
        return super().submit(plan)


def test_a_result_after_the_end_of_the_loop_is_nothing() -> None:
    worker = Announcing()

    async def run() -> None:
        driver = AsyncDriver(bare_engine(), {"lane-0": worker}, LIMIT, Recorder().deliver)
        driver.start()
        driver.add("a", [1], SamplingParams(), 7)
        async with asyncio.timeout(LIMIT):
            await worker.taken.wait()

    asyncio.run(run())
    worker.complete(1)
