"""Executor: the one interface between an engine and a worker, wherever the worker lives.

An executor is one epoch of one worker. Homes: `worker/local_executor.py` (this process),
`cluster/ray_executor.py` (a Ray actor behind a plan stream), `protocol/scripted_executor.py`
(scripted gate scores, no model).

    submission = executor.submit(plan)              # returns at once
    result = submission.collect(timeout=30.0)       # waits, bounded
    submission.retire()                             # its readback buffer may be used again

There is one verb for work: admissions, forks, grants, suspends, resumes and releases are parts of a
plan, so they have its place in the order of the epoch and are answered by its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult


class Submission(Protocol):
    """The ticket of one submitted plan. Safe to use from any thread."""

    @property
    def seq(self) -> int:
        """The plan's sequence number."""

    def ready(self) -> bool:
        """Whether collect would return, or raise, without waiting."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once ready; at once if it is already. It runs on any thread."""

    def collect(self, timeout: float) -> PlanResult:
        """Wait for the result, at most `timeout` seconds; may be called again.

        Raises DeadlineError when the time runs out, WorkerLostError when the worker is gone,
        ExecutorClosedError when the executor was shut down before the plan had run, and after
        retire.
        """

    def retire(self) -> None:
        """Give up the ticket, collected or not, and free what it holds; idempotent.

        A buffer is reused only after its copy completed. A ticket that is dropped unretired is
        warned of and retired by its executor, which is a net and no way to retire.
        """


class Executor(Protocol):
    """Runs plans in the order of their seq. Owner: one engine driver, which alone submits."""

    @property
    def epoch(self) -> int:
        """The epoch that every plan for this executor carries."""

    def profile(self) -> WorkerProfile:
        """Device, model and room of the worker."""

    def submit(self, plan: ExecutionPlan) -> Submission:
        """Enqueue `plan` and return at once.

        Raises ProtocolError for another epoch, a seq that is not the next one, a plan larger than
        the worker takes, or more plans in flight than `MAX_PLANS_IN_FLIGHT`; ExecutorClosedError
        after shutdown; WorkerLostError when the worker is known to be gone.
        """

    def lost(self) -> str | None:
        """Why the worker is gone for good, or None while it is not known to be; never waits."""

    def synchronize(self, timeout: float) -> None:
        """Return once every submitted plan has run. Raises as `Submission.collect` does."""

    def shutdown(self, timeout: float) -> None:
        """Reject new plans, discard what is in flight, free everything; idempotent."""


MAX_PLANS_IN_FLIGHT = 4
"""Submitted and not yet retired plans an executor takes; readback pools are sized by it."""
