"""Both drivers over scripted executors: equal outputs, lost workers, and nothing that hangs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cluster.drivers import AsyncDriver, SyncDriver
from protocol.config import SchedulerSettings
from protocol.errors import ConfigError, ProtocolError, WorkerLostError
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine
from tests.plans import TIMEOUT
from tests.scheduler.bench import make_engine, make_profile, reasons, texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.executor import Executor, Submission
    from protocol.plan import ExecutionPlan
    from scheduler.output import RequestOutput

LIMIT = 20.0
"""Seconds that a test waits at most for what must come."""


def executors(count: int = 1, *, manual: bool = False) -> dict[str, ScriptedExecutor]:
    profile = make_profile()
    return {f"lane-{index}": ScriptedExecutor(profile, manual=manual) for index in range(count)}


def bare_engine() -> Engine:
    """An engine without lanes: the driver brings them."""
    return Engine(SchedulerSettings(prefill_chunk_size=8, max_prefill_tokens=16))


class Recorder:
    """Takes what an AsyncDriver delivers. Owner: one test. Mutated only by: deliver."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.contexts: list[str] = []
        self._delivered = asyncio.Event()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        assert outputs
        self.outputs += outputs
        self.contexts.append(CONTEXT.get())
        self._delivered.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, looked at after each delivery."""
        async with asyncio.timeout(LIMIT):
            while not done():
                self._delivered.clear()
                await self._delivered.wait()

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda: set(request_ids) <= set(reasons(self.outputs)))


CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("context", default="own")

WORKLOAD: list[tuple[str, int, dict[str, Any]]] = [
    (
        f"r{index}",
        1 + 3 * index % 13,
        {"max_tokens": 1 + 5 * index % 11, "exit_threshold": (0.0, 0.5, 0.9, 1.0)[index % 4]},
    )
    for index in range(24)
]


def add_all(add: Callable[..., object]) -> None:
    for request_id, length, params in WORKLOAD:
        add(request_id, [1] * length, SamplingParams(**params), 7)


@pytest.mark.parametrize("lanes", [1, 2])
def test_sync_and_async_give_the_same(lanes: int) -> None:
    engine = bare_engine()
    sync = SyncDriver(engine, executors(lanes), LIMIT)
    add_all(engine.add)
    expected = texts(sync.drain(TIMEOUT))
    sync.close(LIMIT)
    assert {name: len(tokens) for name, (tokens, _) in expected.items()} == {
        name: params["max_tokens"] for name, _, params in WORKLOAD
    }

    async def run() -> Recorder:
        recorder = Recorder()
        driver = AsyncDriver(bare_engine(), executors(lanes), LIMIT, recorder.deliver)
        driver.start()
        add_all(driver.add)
        await recorder.until_ended(*expected)
        await driver.close(LIMIT)
        return recorder

    assert texts(asyncio.run(run()).outputs) == expected


def test_results_from_another_thread() -> None:
    engine = bare_engine()
    workers = executors(manual=True)
    driver = SyncDriver(engine, workers, LIMIT)
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            workers["lane-0"].complete(1000)

    thread = threading.Thread(target=answer)
    thread.start()
    engine.add("a", [1], SamplingParams(max_tokens=3), 7)
    outputs = driver.drain(TIMEOUT)
    done.set()
    thread.join(LIMIT)
    assert reasons(outputs) == {"a": FinishReason.LENGTH}
    driver.close(LIMIT)


def pipelined() -> Engine:
    """An engine that has two plans in flight wherever it can."""
    return Engine(SchedulerSettings(plans_in_flight=2, exit_policy="ouro_delayed"))


def test_a_step_submits_the_next_plan_before_it_waits_for_the_last() -> None:
    engine, workers = pipelined(), executors(manual=True)
    driver = SyncDriver(engine, workers, LIMIT)
    engine.add("a", [1], SamplingParams(max_tokens=2, exit_threshold=1.0), 7)
    done = threading.Event()

    def answer(seq: int) -> None:
        while workers["lane-0"].last_seq <= seq and not done.is_set():
            pass
        workers["lane-0"].complete(seq)

    for seq in range(1, 5):
        # Plan seq is not answered before the worker has plan seq + 1.
        thread = threading.Thread(target=answer, args=(seq,))
        thread.start()
        driver.step()
        done.set()
        thread.join(LIMIT)
        done.clear()
        assert workers["lane-0"].last_seq == seq + 1
        assert engine.stats().lanes[0].in_flight == 1
    workers["lane-0"].complete(1000)
    driver.close(LIMIT)


def test_each_of_two_plans_has_its_own_time_to_be_answered() -> None:
    engine, workers = pipelined(), executors(manual=True)
    driver = SyncDriver(engine, workers, 0.05)
    engine.add("a", [1], SamplingParams(max_tokens=4, exit_threshold=1.0), 7)
    workers["lane-0"].complete(1)
    driver.step()
    outputs = []
    while engine.lanes:
        workers["lane-0"].complete(1)
        outputs += driver.step()
    (error,) = [output.error for output in outputs if output.error]
    assert "no answer to plan 2 within 0.05 s" in error
    driver.close(LIMIT)


def test_a_lane_that_refuses_the_first_of_two_plans_gets_no_second() -> None:
    engine = Engine(SchedulerSettings(plans_in_flight=2))
    worker = Refusing(make_profile())
    driver = SyncDriver(engine, {"lane-0": worker}, LIMIT)
    engine.add("a", [1], SamplingParams(max_tokens=3, forced_depths=(4, 4, 4)), 7)
    assert reasons(driver.step()) == {"a": FinishReason.ERROR}
    assert worker.last_seq == 0
    driver.close(LIMIT)


def test_a_step_without_work_returns_at_once() -> None:
    driver = SyncDriver(bare_engine(), executors(), LIMIT)
    assert driver.step() == []
    assert driver.drain(TIMEOUT) == []
    driver.close(LIMIT)
    driver.close(LIMIT)


def test_lanes_that_the_engine_has_are_kept_and_need_an_executor() -> None:
    engine = make_engine()
    SyncDriver(engine, executors(), LIMIT)
    assert engine.lanes == ("lane-0",)
    with pytest.raises(ConfigError, match="lanes without an executor: lane-0"):
        SyncDriver(engine, {}, LIMIT)


def test_drain_after_an_abort_brings_the_blocks_back() -> None:
    engine = bare_engine()
    driver = SyncDriver(engine, executors(), LIMIT)
    engine.add("a", [1] * 9, SamplingParams(max_tokens=9), 7)
    driver.step()
    engine.abort("a")
    assert driver.drain(TIMEOUT) == []
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    driver.close(LIMIT)


def test_a_worker_lost_in_flight_costs_its_lane_alone() -> None:
    engine = bare_engine()
    workers = executors(2)
    held = ScriptedExecutor(make_profile(), manual=True)
    driver = SyncDriver(engine, {"lane-0": held, "lane-1": workers["lane-1"]}, LIMIT)
    for request_id in "ab":
        engine.add(request_id, [1], SamplingParams(max_tokens=4), 7)
    outputs = driver.step()
    held.lose("the process died")
    outputs += driver.drain(TIMEOUT)
    assert reasons(outputs) == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    (end,) = [output for output in outputs if output.error]
    assert end.error == "lane-0 was closed: the process died"
    driver.close(LIMIT)


def test_an_idle_lost_lane_is_noticed_by_the_next_step() -> None:
    engine = bare_engine()
    workers = executors(2)
    driver = SyncDriver(engine, workers, LIMIT)
    workers["lane-0"].lose("gone")
    driver.step()
    assert engine.lanes == ("lane-1",)
    driver.close(LIMIT)


def test_a_plan_without_an_answer_costs_its_lane() -> None:
    engine = bare_engine()
    driver = SyncDriver(engine, executors(manual=True), 0.01)
    engine.add("a", [1], SamplingParams(), 7)
    (end,) = driver.drain(TIMEOUT)
    assert end.error == "lane-0 was closed: no answer to plan 1 within 0.01 s"
    assert not engine.has_work()
    driver.close(LIMIT)


class Refusing(ScriptedExecutor):
    """Raises instead of taking a plan. Owner: one test. Mutated only by: its methods."""

    error: Exception = ProtocolError("bad plan")

    def submit(self, plan: ExecutionPlan) -> Submission:
        raise self.error


class Unclosable(ScriptedExecutor):
    """Cannot be shut down. Owner: one test. Mutated only by: its methods."""

    def shutdown(self, timeout: float) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("closed", [True, False])
def test_a_refused_plan_costs_its_lane(closed: bool) -> None:
    engine = bare_engine()
    refusing: Executor = Refusing(make_profile())
    if closed:
        refusing = ScriptedExecutor(make_profile())
        refusing.shutdown(1.0)
    driver = SyncDriver(engine, {**executors(2), "lane-0": refusing}, LIMIT)
    for request_id in "ab":
        engine.add(request_id, [1], SamplingParams(max_tokens=2), 7)
    outputs = driver.drain(TIMEOUT)
    assert reasons(outputs) == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    word = "ExecutorClosedError" if closed else "ProtocolError: bad plan"
    assert word in next(output.error for output in outputs if output.error)
    driver.close(LIMIT)


def test_a_failing_shutdown_is_contained() -> None:
    engine = bare_engine()
    worker = Unclosable(make_profile())
    driver = SyncDriver(engine, {"lane-0": worker}, LIMIT)
    driver.close(LIMIT)
    assert engine.lanes == ()


def test_an_executor_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()

    class Slow(ScriptedExecutor):
        """Ends when it is told to. Owner: one test. Mutated only by: its methods."""

        def shutdown(self, timeout: float) -> None:
            release.wait(LIMIT)

    driver = SyncDriver(bare_engine(), {"lane-0": Slow(make_profile())}, LIMIT)
    driver.close(0.01)
    release.set()
    driver.close(LIMIT)


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
