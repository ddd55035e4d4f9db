"""LocalExecutor: the executor of this process, with one device thread and a bounded queue.

On a GPU the device thread only enqueues, and a second one waits for the device and answers, so
that a plan is enqueued while the one before it runs.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from protocol.errors import DeadlineError, ExecutorClosedError, WorkerLostError
from protocol.lifecycle import Phase
from protocol.plan_order import PlanOrder
from protocol.submission import FutureSubmission, TicketNet, wait
from worker.outcome import PlanOutcome
from worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from protocol.config import WorkerSettings
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile
    from worker.readback import ReadbackLease

logger = logging.getLogger(__name__)

OPEN_TIMEOUT = 600.0
SHUTDOWN_TIMEOUT = 30.0


class LocalExecutor:
    """Owner: whoever opened it. Mutated only by: its methods, and its device thread.

    The device thread opens the worker, runs what is queued in order, and closes the worker, so
    submit only enqueues and every touch of the device has one thread. Answers are given in the
    same order.
    """

    def __init__(self, settings: WorkerSettings, epoch: int) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._order = PlanOrder(epoch)
        self._net = TicketNet()
        self._done_seq = 0
        self._begun = 0
        self._answered = 0
        self._news = 0
        self._closed = False
        self._lost: str | None = None
        self._opened: Future[Worker] = Future()
        self._worker: Worker
        self._profile: WorkerProfile
        self._thread = threading.Thread(target=self._main, name="loopmesh-device", daemon=True)

    @classmethod
    def open(cls, settings: WorkerSettings, epoch: int = 1, timeout: float = OPEN_TIMEOUT) -> Self:
        """Start the device thread and wait until its worker is ready.

        Raises what `Worker.open` raises, DeadlineError after `timeout` seconds.
        """
        executor = cls(settings, epoch)
        executor._start(timeout)
        return executor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown(SHUTDOWN_TIMEOUT)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"lost: {self._lost}" if self._lost else "open"
        return f"<LocalExecutor epoch {self.epoch}, {self._order.in_flight} in flight, {state}>"

    @property
    def epoch(self) -> int:
        """The epoch that every plan carries."""
        return self._order.epoch

    def profile(self) -> WorkerProfile:
        """Device, model and room of the worker."""
        return self._profile

    def progress(self) -> tuple[int, int, Phase]:
        """Last finished seq, steps finished since the start, and what the device thread does."""
        phase = Phase.RUNNING if self._begun > self._answered else Phase.IDLE
        return self._done_seq, self._worker.steps_done, phase

    def lost(self) -> str | None:
        """Why the device is unusable for good, or None."""
        return self._lost

    def submit(self, plan: ExecutionPlan) -> FutureSubmission[PlanOutcome]:
        """Enqueue a plan; see protocol.executor.Executor.submit for what it raises."""
        self._net.reclaim()
        with self._lock:
            self._require_open()
            self._order.take(plan, self._profile)
            lease = self._worker.readback.lease()
            future: Future[PlanOutcome] = Future()
            self._news += plan.interrupts
            self._queue.put(_Task(lambda: self._execute(plan, lease), future, plan.seq))

        def give_back() -> None:
            with self._lock:
                self._worker.give_back(lease)
                self._order.retire()

        return FutureSubmission(plan.seq, future, PlanOutcome.read, give_back, self._net)

    def synchronize(self, timeout: float) -> None:
        """Return once every submitted plan has run."""
        self._net.reclaim()
        done: Future[None] = Future()
        with self._lock:
            self._require_open()
            self._queue.put(_Task(lambda: None, done))
        wait(done, timeout, "synchronize")

    def begin_epoch(self, epoch: int, timeout: float) -> None:
        """Drop every request and start counting plans anew; the model stays.

        Every plan of the last epoch runs to its end before; whoever holds its ticket may still
        collect it. Raises ProtocolError unless `epoch` is newer.
        """
        done: Future[None] = Future()
        with self._lock:
            self._require_open()
            self._order.begin(epoch)
            self._queue.put(_Task(self._worker.runner.reset, done, seq=0))
        wait(done, timeout, f"epoch {epoch}")

    def shutdown(self, timeout: float) -> None:
        """Reject new plans, discard queued ones, close the worker; idempotent.

        Raises DeadlineError when the running plan does not end within `timeout` seconds.
        """
        self._net.reclaim()
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(f"shutdown: the running plan did not end within {timeout:g} s")

    def _start(self, timeout: float) -> None:
        self._thread.start()
        try:
            self._worker = wait(self._opened, timeout, "opening the worker")
        except BaseException:
            self._closed = True
            self._queue.put(None)
            raise
        self._profile = self._worker.profile

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutorClosedError("the executor is shut down; open a new one")
        if self._lost is not None:
            raise WorkerLostError(self._lost)

    def _execute(self, plan: ExecutionPlan, lease: ReadbackLease) -> PlanOutcome:
        with self._lock:
            self._news -= plan.interrupts
        return self._worker.runner.execute(plan, lease, self._has_news)

    def _has_news(self) -> bool:
        """Whether ticks make way: for a plan that interrupts, or since nobody will want them."""
        return self._news > 0 or self._closed

    def _main(self) -> None:
        try:
            worker = Worker.open(self._settings)
        except BaseException as error:  # handed to whoever waits in open
            self._opened.set_exception(error)
            return
        self._opened.set_result(worker)
        answers: queue.SimpleQueue[tuple[_Task, Any] | None] = queue.SimpleQueue()
        answer: Callable[[_Task, Any], None] = self._answer
        waiting = None
        if worker.asynchronous:
            waiting = threading.Thread(
                target=self._answer_all, args=(answers,), name="loopmesh-answers", daemon=True
            )
            waiting.start()
            answer = lambda task, value: answers.put((task, value))  # noqa: E731
        try:
            while (task := self._queue.get()) is not None:
                self._run(task, answer)
        finally:
            if waiting is not None:
                answers.put(None)
                waiting.join()
            worker.close()

    def _run(self, task: _Task, answer: Callable[[_Task, Any], None]) -> None:
        if self._closed:
            task.future.set_exception(ExecutorClosedError("shut down before the plan ran"))
            return
        if self._lost is not None:
            task.future.set_exception(WorkerLostError(self._lost))
            return
        self._begun += 1
        try:
            value = task.work()
        except Exception as error:  # steps fail their own requests; this is the device itself
            self._fail(task, error)
        else:
            answer(task, value)

    def _answer_all(self, answers: queue.SimpleQueue[tuple[_Task, Any] | None]) -> None:
        while (item := answers.get()) is not None:
            self._answer(*item)

    def _answer(self, task: _Task, value: Any) -> None:  # noqa: ANN401 - what its work returned
        """Tell whoever waits, once the device is done with it."""
        try:
            if isinstance(value, PlanOutcome):
                self._worker.runner.finish(value)
        except Exception as error:
            self._fail(task, error)
            return
        self._done_seq = task.seq if task.seq is not None else self._done_seq
        self._count_answer()
        task.future.set_result(value)

    def _fail(self, task: _Task, error: Exception) -> None:
        logger.error("the device failed", exc_info=error)
        self._lost = f"the device failed: {type(error).__name__}: {error}"
        self._count_answer()
        task.future.set_exception(WorkerLostError(self._lost))

    def _count_answer(self) -> None:
        with self._lock:  # either thread may fail
            self._answered += 1


@dataclass(frozen=True, slots=True)
class _Task:
    """Work for the device thread; `seq` is set for a plan."""

    work: Callable[[], Any]
    future: Future[Any]
    seq: int | None = None
