"""The net below tickets: one that is dropped unretired is told of, and gives back what it holds."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, WorkerSettings
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.plan import ExecutionPlan, Step
from tests.homes import HOMES, open_home
from tests.plans import TIMEOUT, PlanSender

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.executor import Executor, Submission

SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=4, num_threads=1
)
NET = "protocol.submission"


@pytest.fixture(params=HOMES)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with open_home(request.param) as open_executor:
        yield open_executor(SETTINGS)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the net has logged."""
    return [record.getMessage() for record in caplog.records if record.name == NET]


def test_a_dropped_ticket_is_told_of_and_frees_its_place(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    sender = PlanSender(executor)
    count = 3 * MAX_PLANS_IN_FLIGHT
    for _ in range(count):
        sender.submit()
        executor.synchronize(TIMEOUT)
    messages = told(caplog)
    assert len(messages) == count
    assert messages[6].startswith("the ticket of plan 7 was dropped without being retired")
    assert "call retire()" in messages[6]
    assert sender.run().seq == count + 1


def test_a_ticket_that_was_only_collected_is_caught_by_the_next_plan(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    sender = PlanSender(executor)
    for _ in range(3 * MAX_PLANS_IN_FLIGHT):
        assert sender.submit().collect(TIMEOUT).seq == sender.seq
    sender.run()
    assert len(told(caplog)) == 3 * MAX_PLANS_IN_FLIGHT


def test_a_retired_ticket_says_nothing(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    sender = PlanSender(executor)
    sender.run()
    sender.submit().retire()
    executor.synchronize(TIMEOUT)
    executor.shutdown(TIMEOUT)
    assert told(caplog) == []


def test_shutdown_tells_of_what_was_dropped_before(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    PlanSender(executor).submit()
    executor.shutdown(TIMEOUT)
    assert len(told(caplog)) == 1
    assert "0 in flight" in repr(executor)


class Collecting(tuple[Step, ...]):
    """Steps of no plan that collect garbage whenever somebody looks at them.

    An executor looks at them to judge the plan's size, in the block that holds its lock.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Step]:
        gc.collect()
        return super().__iter__()


def test_a_collection_while_the_executor_is_locked_is_no_deadlock(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    gc.disable()
    try:
        plan = ExecutionPlan(executor.epoch, 2, steps=Collecting())
        in_a_circle: list[object] = [PlanSender(executor).submit()]
        vanished = weakref.ref(in_a_circle[0])
        in_a_circle.append(in_a_circle)
        executor.synchronize(TIMEOUT)
        del in_a_circle
        assert vanished() is not None
        submitted: list[Submission] = []
        thread = threading.Thread(target=lambda: submitted.append(executor.submit(plan)))
        thread.daemon = True
        thread.start()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        assert vanished() is None
    finally:
        gc.enable()
    (ticket,) = submitted
    assert ticket.collect(TIMEOUT).seq == 2
    ticket.retire()
    executor.synchronize(TIMEOUT)
    assert len(told(caplog)) == 1
    assert "0 in flight" in repr(executor)
