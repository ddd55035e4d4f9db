"""LocalExecutor beyond the shared contract: epochs, its thread, and what it gives back."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from protocol.config import CacheSettings, ModelSettings, WorkerSettings
from protocol.errors import (
    ConfigError,
    DeadlineError,
    ExecutorClosedError,
    ModelError,
    ProtocolError,
)
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.identity import RequestKey
from protocol.lifecycle import Phase
from protocol.plan import ExecutionPlan, RecurrentBatch
from protocol.resident import ResidentBatch, ResidentTerms, RowState
from protocol.result import ResidentResult
from tests.plans import TIMEOUT, PlanSender, admission, block_table, coda, prefill, prelude
from worker.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

A = RequestKey("a", 1)
PROMPT = (1648, 1424, 261, 658, 14)
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=4, num_threads=1
)


@pytest.fixture
def executor() -> Iterator[LocalExecutor]:
    with LocalExecutor.open(SETTINGS) as opened:
        yield opened


def device_threads() -> int:
    return sum(thread.name == "loopmesh-device" for thread in threading.enumerate())


def test_the_profile_leaves_the_scratch_block_out(executor: LocalExecutor) -> None:
    profile = executor.profile()
    assert (profile.num_blocks, profile.block_size, profile.planes) == (64, 4, 4)
    assert (profile.num_slots, profile.device, profile.dtype) == (4, "cpu", "float32")


def test_leaving_the_block_ends_the_device_thread() -> None:
    before = device_threads()
    with LocalExecutor.open(SETTINGS):
        assert device_threads() == before + 1
    assert device_threads() == before


def test_a_new_epoch_drops_requests_and_counts_anew(executor: LocalExecutor) -> None:
    sender = PlanSender(executor)
    admit = admission(A, PROMPT, block_table(executor.profile(), 8))
    sender.run(prefill(A, 0, 5), admits=(admit,))
    executor.begin_epoch(5, TIMEOUT)
    assert executor.epoch == 5
    assert executor.progress()[0] == 0
    with pytest.raises(ProtocolError, match="epoch 1"):
        executor.submit(ExecutionPlan(1, 2))
    again = PlanSender(executor)
    assert [row.key for row in again.run(coda(A, 4, 4, 0)).failed] == [A]
    fresh = again.run(prefill(A, 0, 5), releases=(A,), admits=(admit,))
    assert not fresh.failed
    with pytest.raises(ProtocolError, match="not newer"):
        executor.begin_epoch(5, TIMEOUT)


def test_a_ticket_of_the_last_epoch_can_still_be_collected(executor: LocalExecutor) -> None:
    submission = PlanSender(executor).submit()
    executor.begin_epoch(2, TIMEOUT)
    assert submission.collect(TIMEOUT).epoch == 1
    submission.retire()


def test_progress_counts_finished_plans_and_steps(executor: LocalExecutor) -> None:
    sender = PlanSender(executor)
    admit = admission(A, PROMPT, block_table(executor.profile(), 8))
    sender.run(prefill(A, 0, 5), coda(A, 4, 4, 0), prelude(A, 5), admits=(admit,))
    executor.synchronize(TIMEOUT)
    assert executor.progress() == (1, 3, Phase.IDLE)


def test_more_rows_than_a_readback_buffer_holds_are_refused(executor: LocalExecutor) -> None:
    many = executor.profile().max_step_tokens + 1
    keys = tuple(RequestKey(f"r{number}", number + 1) for number in range(many))
    batch = RecurrentBatch(keys, (0,) * many, (0,) * many)
    with pytest.raises(ProtocolError, match="split the plan"):
        executor.submit(ExecutionPlan(1, 1, steps=(batch,)))
    assert PlanSender(executor).run().seq == 1


def test_every_lease_comes_back(executor: LocalExecutor) -> None:
    sender = PlanSender(executor)
    for _ in range(5 * MAX_PLANS_IN_FLIGHT):
        sender.run()
    held = [sender.submit() for _ in range(MAX_PLANS_IN_FLIGHT)]
    assert repr(executor) == f"<LocalExecutor epoch 1, {MAX_PLANS_IN_FLIGHT} in flight, open>"
    for submission in held:
        submission.retire()
    executor.synchronize(TIMEOUT)
    assert repr(executor) == "<LocalExecutor epoch 1, 0 in flight, open>"


def test_queued_plans_end_with_shutdown(executor: LocalExecutor) -> None:
    sender = PlanSender(executor)
    held = [sender.submit() for _ in range(MAX_PLANS_IN_FLIGHT)]
    executor.shutdown(TIMEOUT)
    assert all(submission.ready() for submission in held)
    with pytest.raises(ExecutorClosedError):
        executor.begin_epoch(2, TIMEOUT)


def resident_prompt(executor: LocalExecutor) -> PlanSender:
    """A sender whose request A is through its prompt and has ticks for half a second ahead."""
    sender = PlanSender(executor)
    long = replace(
        admission(A, PROMPT, block_table(executor.profile(), 405)),
        resident=ResidentTerms(min_loops=1, max_loops=4, bound=-1.0, max_tokens=400),
    )
    assert not sender.run(prefill(A, 0, 5), admits=(long,)).failed
    return sender


def test_shutdown_ends_running_ticks_and_discards_what_waits() -> None:
    roomy = SETTINGS.model_copy(
        update={"cache": CacheSettings(block_size=4, num_blocks=512), "max_ticks": 1024}
    )
    with LocalExecutor.open(roomy) as executor:
        sender = resident_prompt(executor)
        running, waiting = (sender.submit(ResidentBatch((A,), 1024)) for _ in range(2))
        deadline = time.monotonic() + TIMEOUT
        while executor.progress()[2] is not Phase.RUNNING:
            assert time.monotonic() < deadline
        executor.shutdown(TIMEOUT)
        # What ran is told as far as it came; what waited has never started.
        (row,) = running.collect(0.0).steps
        assert isinstance(row, ResidentResult)
        assert 0 < row.ticks < 1024
        assert row.states == (RowState.READY,)
        with pytest.raises(ExecutorClosedError, match="before the plan ran"):
            waiting.collect(0.0)
        for ticket in (running, waiting):
            ticket.retire()
        assert repr(executor) == "<LocalExecutor epoch 1, 0 in flight, closed>"
        executor.shutdown(0.0)
        with pytest.raises(ExecutorClosedError):
            executor.submit(ExecutionPlan(1, sender.seq + 1))
        assert repr(executor) == "<LocalExecutor epoch 1, 0 in flight, closed>"


def test_a_worker_that_opens_too_late_is_closed_as_well() -> None:
    before = device_threads()
    with pytest.raises(DeadlineError):
        LocalExecutor.open(SETTINGS, timeout=0.0)
    for thread in threading.enumerate():
        if thread.name == "loopmesh-device":
            thread.join(TIMEOUT)
    assert device_threads() == before


def test_opening_fails_with_the_worker_s_own_error(tmp_path: Path) -> None:
    before = device_threads()
    missing = SETTINGS.model_copy(update={"model": ModelSettings(model=str(tmp_path))})
    with pytest.raises(ModelError, match=r"config\.json"):
        LocalExecutor.open(missing)
    tiny = SETTINGS.model_copy(update={"cache": CacheSettings(num_blocks=3)})
    with pytest.raises(ConfigError, match="4 planes"):
        LocalExecutor.open(tiny)
    assert device_threads() == before
