"""ScriptedExecutor: a worker without a model, for tests and benchmarks of everything above it.

It follows `protocol.executor.Executor` to the letter and checks every row as a worker must, but
hazards and tokens come from two functions.

    executor = ScriptedExecutor(profile, hazard=lambda key, position, depth: 0.5)
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from protocol.errors import ExecutorClosedError, WorkerLostError
from protocol.plan_order import PlanOrder
from protocol.scripted_worker import ScriptedWorker
from protocol.submission import FutureSubmission, TicketNet, wait

if TYPE_CHECKING:
    from protocol.executor import Submission
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan
    from protocol.profile import ModelProfile, WorkerProfile
    from protocol.result import PlanResult
    from protocol.scripted_resident import Hazard, Token


class ScriptedExecutor:
    """One epoch of a scripted worker. Owner: whoever made it. Mutated only by: its methods.

    `hazard(key, position, depth)` in [0, 1] is the gate after the loop at a 0-based depth,
    `token(key, output_index)` the sampled token; the defaults depend on the request id alone, not
    on its generation. A plan runs within `submit`; with `manual` its result stays back until
    `complete`. Safe to use from any thread.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        epoch: int = 1,
        *,
        hazard: Hazard | None = None,
        token: Token | None = None,
        manual: bool = False,
    ) -> None:
        self._profile = profile
        self._order = PlanOrder(epoch)
        self._net = TicketNet()
        self._manual = manual
        self._worker = ScriptedWorker(
            profile, hazard or scripted_hazard, token or scripted_token(profile.model)
        )
        self._lock = threading.Lock()
        self._held: deque[tuple[int, Future[PlanResult], PlanResult]] = deque()
        self._lost: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<ScriptedExecutor epoch {self.epoch}: plan {self.last_seq}, "
            f"{self._order.in_flight} in flight, {len(self._held)} held back>"
        )

    @property
    def epoch(self) -> int:
        """The epoch that every plan carries."""
        return self._order.epoch

    def profile(self) -> WorkerProfile:
        """The profile it was made with."""
        return self._profile

    def submit(self, plan: ExecutionPlan) -> Submission:
        """Run `plan`; see protocol.executor.Executor.submit for the errors.

        ProtocolError also for a step that is larger than the worker takes.
        """
        self._net.reclaim()
        future: Future[PlanResult] = Future()
        with self._lock:
            self._check_open()
            self._order.take(plan, self._profile)
            self._held.append((plan.seq, future, self._worker.run(plan)))
        if not self._manual:
            self.complete(plan.seq)
        return FutureSubmission(plan.seq, future, lambda result: result, self._retired, self._net)

    def complete(self, seq: int) -> None:
        """Make the results of all plans up to `seq` ready, in order; earlier ones are no error."""
        ready = []
        with self._lock:
            while self._held and self._held[0][0] <= seq:
                ready.append(self._held.popleft())
        # Outside the lock: callbacks of a submission may call back into this executor.
        for _, future, result in ready:
            future.set_result(result)

    def lose(self, reason: str) -> None:
        """The worker is gone: plans without a result end with WorkerLostError."""
        with self._lock:
            self._lost = self._lost or reason
        self._drop_held(WorkerLostError(f"scripted worker: {reason}"))

    def lost(self) -> str | None:
        """Why the worker is gone, or None."""
        return self._lost

    @property
    def last_seq(self) -> int:
        """The seq of the last plan it took; 0 before the first."""
        return self._order.last_seq

    def held_keys(self) -> tuple[RequestKey, ...]:
        """The requests that hold a slot on the worker."""
        with self._lock:
            return self._worker.keys()

    def suspended_keys(self) -> tuple[RequestKey, ...]:
        """The requests whose snapshot the worker keeps."""
        with self._lock:
            return self._worker.suspended_keys()

    def synchronize(self, timeout: float) -> None:
        """Return once every submitted plan has its result."""
        self._net.reclaim()
        with self._lock:
            self._check_open()
            last = self._held[-1][1] if self._held else None
        if last is not None:
            wait(last, timeout, f"synchronize with plan {self.last_seq}")

    def shutdown(self, timeout: float) -> None:
        """Reject new plans and end those without a result; idempotent, never waits."""
        del timeout
        with self._lock:
            self._closed = True
            self._worker.clear()
        self._drop_held(ExecutorClosedError("the scripted executor was shut down"))
        self._net.reclaim()

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorClosedError("the scripted executor was shut down: make a new one")
        if self._lost is not None:
            raise WorkerLostError(f"scripted worker: {self._lost}")

    def _retired(self) -> None:
        with self._lock:
            self._order.retire()

    def _drop_held(self, error: Exception) -> None:
        with self._lock:
            dropped = tuple(self._held)
            self._held.clear()
        for _, future, _ in dropped:
            future.set_exception(error)


def scripted_hazard(key: RequestKey, position: int, depth: int) -> float:
    """The default gate: a hash of request id, position and depth, uniform in [0, 1)."""
    return zlib.crc32(f"{key.request_id}:{position}:{depth}".encode()) / 2**32


def scripted_token(model: ModelProfile) -> Token:
    """The default sampler: a hash of request id and output index, never an end of sequence.

    A model whose whole vocabulary ends the sequence gets such a token all the same.
    """

    def token(key: RequestKey, output_index: int) -> int:
        first = zlib.crc32(f"{key.request_id}:{output_index}".encode())
        candidates = ((first + step) % model.vocab_size for step in range(len(model.eos_ids) + 1))
        return next((c for c in candidates if c not in model.eos_ids), first % model.vocab_size)

    return token
