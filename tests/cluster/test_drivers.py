"""The synchronous driver over scripted executors: lost workers, and nothing that hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.drivers import AsyncDriver, SyncDriver
from protocol.config import SchedulerSettings
from protocol.errors import ConfigError
from protocol.exit_rule import FinishReason
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine
from tests.cluster.driving import (
    LIMIT,
    WORKLOAD,
    Recorder,
    Refusing,
    add_all,
    bare_engine,
    executors,
)
from tests.plans import TIMEOUT
from tests.scheduler.bench import make_engine, make_profile, reasons, texts

if TYPE_CHECKING:
    from protocol.executor import Executor


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
