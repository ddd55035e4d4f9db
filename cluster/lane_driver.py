"""LaneDriver: the executors of an engine's lanes, and the submissions that are in flight."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import (
    ConfigError,
    DeadlineError,
    ExecutorClosedError,
    ProtocolError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from protocol.executor import Executor, Submission
    from scheduler.engine import Engine
    from scheduler.output import RequestOutput

logger = logging.getLogger(__name__)

LOST_CHECK_INTERVAL = 0.5
"""Seconds after which a driver looks again whether an executor is lost, busy or idle."""

SHUTDOWN_TIMEOUT = 10.0
"""Seconds that the executor of a closed lane has to shut down, off the driver's thread."""

LANE_ERRORS = (DeadlineError, WorkerLostError, ExecutorClosedError, ProtocolError)
"""What an executor may raise: it costs its own lane, and no other."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A submission in flight, and the monotonic time at which its patience ends."""

    submission: Submission
    deadline: float


class LaneDriver:
    """The verbs that both drivers share; none of them waits.

    Owner: one driver. Mutated only by: its thread. `wake` is called from any thread when a result
    is ready, `emit` with outputs as soon as there are any. Lanes that the engine does not have yet
    are added to it; ConfigError for a lane of the engine without an executor.
    """

    def __init__(
        self,
        engine: Engine,
        executors: Mapping[str, Executor],
        plan_timeout: float,
        wake: Callable[[], None],
        emit: Callable[[list[RequestOutput]], None],
    ) -> None:
        for lane, executor in executors.items():
            if lane not in engine.lanes:
                engine.add_lane(lane, executor.epoch, executor.profile())
        if missing := set(engine.lanes) - set(executors):
            raise ConfigError(f"lanes without an executor: {', '.join(sorted(missing))}")
        self._engine = engine
        self._executors = dict(executors)
        self._plan_timeout = plan_timeout
        self._wake = wake
        self._emit = emit
        self._tickets: dict[str, _Ticket] = {}
        self._shutdowns: list[threading.Thread] = []

    def close_lost(self) -> None:
        """Close the lanes whose worker is gone or lets its plan wait too long."""
        for lane, reason in tuple(self._troubles()):
            self.close_lane(lane, reason)

    def submit_plans(self) -> None:
        """Submit what the engine plans now; a lane that refuses its plan is closed."""
        for lane, plan in self._engine.plan(time.monotonic()):
            try:
                submission = self._executors[lane].submit(plan)
            except LANE_ERRORS as error:
                self.close_lane(lane, _reason(error))
            else:
                self._tickets[lane] = _Ticket(submission, time.monotonic() + self._plan_timeout)
                submission.add_done_callback(self._wake)

    def is_waiting(self) -> bool:
        """Whether something is in flight and there is nothing to do about any of it yet."""
        ready = (ticket.submission.ready() for ticket in self._tickets.values())
        return bool(self._tickets) and not any(ready) and not any(self._troubles())

    def patience(self) -> float:
        """Seconds until the driver must look again, whatever has happened."""
        deadlines = [ticket.deadline for ticket in self._tickets.values()]
        left = min(deadlines, default=float("inf")) - time.monotonic()
        return min(max(left, 0.0), LOST_CHECK_INTERVAL)

    def collect(self) -> None:
        """Collect, retire and apply every result that is ready, in the order of the lanes."""
        for lane in self._engine.lanes:
            ticket = self._tickets.get(lane)
            if ticket is None or not ticket.submission.ready():
                continue
            try:
                result = ticket.submission.collect(timeout=0.0)
            except LANE_ERRORS as error:
                self.close_lane(lane, _reason(error))
                continue
            del self._tickets[lane]
            ticket.submission.retire()
            self._emit(self._engine.apply(lane, result, time.monotonic()))

    def close_lane(self, lane: str, reason: str, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the lane's requests and shut its executor down, without waiting for it."""
        ticket = self._tickets.pop(lane, None)
        if ticket is not None:
            ticket.submission.retire()
        executor = self._executors.pop(lane, None)
        if executor is not None:
            self._shut_down(lane, executor, timeout)
        self._emit(self._engine.close_lane(lane, reason))

    def close_all(self, reason: str, timeout: float) -> None:
        """Close every lane that is left; `join` waits for the executors."""
        for lane in tuple(self._executors):
            self.close_lane(lane, reason, timeout)

    def join(self, timeout: float) -> None:
        """Wait until every executor that was closed has shut down, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for thread in self._shutdowns:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._shutdowns = [thread for thread in self._shutdowns if thread.is_alive()]
        for thread in self._shutdowns:
            logger.error("%s did not end within %g s; leaving it behind", thread.name, timeout)

    def _troubles(self) -> Iterator[tuple[str, str]]:
        now = time.monotonic()
        for lane, executor in self._executors.items():
            lost = executor.lost()
            ticket = self._tickets.get(lane)
            if lost is not None:
                yield lane, lost
            elif ticket is not None and now >= ticket.deadline and not ticket.submission.ready():
                plan = f"plan {ticket.submission.seq}"
                yield lane, f"no answer to {plan} within {self._plan_timeout:g} s"

    def _shut_down(self, lane: str, executor: Executor, timeout: float) -> None:
        def run() -> None:
            try:
                executor.shutdown(timeout)
            except Exception:
                logger.exception("shutting %s down failed", lane)

        thread = threading.Thread(target=run, name=f"shutdown-{lane}", daemon=True)
        thread.start()
        self._shutdowns.append(thread)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
