"""LaneDriver: the executors of an engine's lanes, and the submissions that are in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from math import inf
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


class _Flight:
    """One lane's submissions in flight, oldest first. Owner: LaneDriver, which alone mutates it.

    Only the first has a deadline, a monotonic time: those behind it wait for it.
    """

    def __init__(self, plan_timeout: float) -> None:
        self._timeout = plan_timeout
        self._submissions: deque[Submission] = deque()
        self.deadline = inf

    def __bool__(self) -> bool:
        return bool(self._submissions)

    @property
    def first(self) -> Submission:
        return self._submissions[0]

    @property
    def ready(self) -> bool:
        return bool(self._submissions) and self.first.ready()

    def add(self, submission: Submission) -> None:
        self._submissions.append(submission)
        if len(self._submissions) == 1:
            self._start()

    def retire(self) -> None:
        """The first is done with."""
        self._submissions.popleft().retire()
        self._start()

    def _start(self) -> None:
        self.deadline = time.monotonic() + self._timeout if self._submissions else inf


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
        self._flights = {lane: _Flight(plan_timeout) for lane in executors}
        self._shutdowns: list[threading.Thread] = []

    def close_lost(self) -> None:
        """Close the lanes whose worker is gone or lets its plan wait too long."""
        for lane, reason in tuple(self._troubles()):
            self.close_lane(lane, reason)

    def submit_plans(self) -> None:
        """Submit what the engine plans now; a lane that refuses its plan is closed."""
        for lane, plan in self._engine.plan(time.monotonic()):
            if lane not in self._executors:  # it refused the plan before this one
                continue
            try:
                submission = self._executors[lane].submit(plan)
            except LANE_ERRORS as error:
                self.close_lane(lane, _reason(error))
            else:
                self._flights[lane].add(submission)
                submission.add_done_callback(self._wake)

    def is_waiting(self) -> bool:
        """Whether something is in flight and there is nothing to do about any of it yet."""
        flights = self._flights.values()
        nothing_ready = any(flights) and not any(flight.ready for flight in flights)
        return nothing_ready and not any(self._troubles())

    def patience(self) -> float:
        """Seconds until the driver must look again, whatever has happened."""
        deadlines = [flight.deadline for flight in self._flights.values()]
        left = min(deadlines, default=inf) - time.monotonic()
        return min(max(left, 0.0), LOST_CHECK_INTERVAL)

    def collect(self) -> None:
        """Collect, retire and apply every result that is ready, in the order of the lanes."""
        for lane in self._engine.lanes:
            while lane in self._flights and self._flights[lane].ready:
                self._collect_first(lane)

    def _collect_first(self, lane: str) -> None:
        flight = self._flights[lane]
        try:
            result = flight.first.collect(timeout=0.0)
        except LANE_ERRORS as error:
            self.close_lane(lane, _reason(error))
        else:
            flight.retire()
            self._emit(self._engine.apply(lane, result, time.monotonic()))

    def close_lane(self, lane: str, reason: str, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the lane's requests and shut its executor down, without waiting for it."""
        flight = self._flights.pop(lane, None)
        while flight:
            flight.retire()
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
            flight = self._flights[lane]
            if lost is not None:
                yield lane, lost
            elif now >= flight.deadline and not flight.ready:
                plan = f"plan {flight.first.seq}"
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
